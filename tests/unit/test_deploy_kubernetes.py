"""The manifests for Kubernetes: by schema, and what in them must agree with what else."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
from deploy_files import DEPLOY, container, documents, groups, pod_commands
from kuberay_schema import problems, refusals

from legato.cluster.autoscale_options import AutoscaleOptions
from legato.cluster.cli.serve_settings import load

if TYPE_CHECKING:
    from collections.abc import Callable

Documents = list[dict[str, Any]]
RESERVED = {"CPU", "GPU", "memory"}


def of_kind(found: Documents, kind: str) -> Documents:
    return [doc for doc in found if doc["kind"] == kind]


def cluster_of(found: Documents) -> dict[str, Any]:
    [cluster] = of_kind(found, "RayCluster")
    return cluster


def pods(found: Documents) -> dict[str, dict[str, Any]]:
    """Labels that KubeRay gives its pods, and those of their templates, by group."""
    cluster = cluster_of(found)
    made = {}
    for name, group in groups(cluster).items():
        own = {
            "ray.io/cluster": cluster["metadata"]["name"],
            "ray.io/group": name,
            "ray.io/node-type": "head" if name == "headgroup" else "worker",
        }
        made[name] = {**group["template"]["metadata"]["labels"], **own}
    return made


def selected(found: Documents, selector: dict[str, str]) -> set[str]:
    return {name for name, labels in pods(found).items() if selector.items() <= labels.items()}


def serve_words(found: Documents) -> dict[str, str]:
    [serve] = [c for c in pod_commands(cluster_of(found)) if c.words[:2] == ("legato", "serve")]
    words = [word.removeprefix("--").partition("=") for word in serve.words[2:]]
    return {name.replace("-", "_"): value or "yes" for name, _, value in words}


def container_ports(group: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(group)["ports"]}


def wrong(found: Documents) -> list[str]:
    """All that does not agree; the schemas first."""
    told = [problem for doc in found for problem in problems(doc)]
    if told:
        return told
    return [
        *refusals(cluster_of(found)),
        *wrong_services(found),
        *wrong_probes(found),
        *wrong_resources(found),
        *wrong_hooks(found),
        *wrong_budgets(found),
    ]


def wrong_services(found: Documents) -> list[str]:
    told = []
    by_name = groups(cluster_of(found))
    settings = serve_words(found)
    served = {int(settings["port"]), int(settings["http_port"])}
    for service in of_kind(found, "Service"):
        name = service["metadata"]["name"]
        chosen = selected(found, service["spec"]["selector"])
        if not chosen:
            told.append(f"{name} selects no pod")
        for port in service["spec"]["ports"]:
            for group in chosen:
                ports = container_ports(by_name[group])
                target = port["targetPort"]
                number = ports.get(target) if isinstance(target, str) else target
                if number not in served & set(ports.values()):
                    told.append(f"{name}: {target} is no port of {group} that is served")
                elif port["port"] != number:
                    told.append(f"{name}: {port['port']} is not {number}")
    for policy in of_kind(found, "NetworkPolicy"):
        if not selected(found, policy["spec"]["podSelector"]["matchLabels"]):
            told.append("the network policy selects no pod")
        opened = {p["port"] for rule in policy["spec"]["ingress"] for p in rule.get("ports", [])}
        if opened != served:
            told.append(f"the network policy opens {sorted(opened)}, served are {sorted(served)}")
    return told


def wrong_probes(found: Documents) -> list[str]:
    told = []
    for name, group in groups(cluster_of(found)).items():
        box, ports = container(group), set(container_ports(group).values())
        starts = [c for c in pod_commands(cluster_of(found)) if c.place == f"{name} container"]
        listens = {
            int(c.flag(f)) for c in starts for f in ("port", "node-manager-port") if c.flag(f)
        }
        listens |= {int(c.flag("http-port")) for c in starts if c.flag("http-port")}
        if ports != listens:
            told.append(
                f"{name}: ports {sorted(ports)}, and its commands listen at {sorted(listens)}"
            )
        asked = {which: box[which]["grpc"]["port"] for which in ("readinessProbe", "livenessProbe")}
        told += [
            f"{name}: {which} asks {port}, no port of it"
            for which, port in asked.items()
            if port not in ports
        ]
    return told


def wrong_resources(found: Documents) -> list[str]:
    """What workers ask for is there; the autoscaler, `ray start` and Kubernetes say the same."""
    told = []
    cluster = cluster_of(found)
    config = load(serve_words(found), None).config
    head, by_name = groups(cluster)["headgroup"], groups(cluster)
    for role in ("prefill", "decode"):
        group = by_name[role]
        [start] = [c for c in pod_commands(cluster) if c.place == f"{role} container"]
        params = group["rayStartParams"]
        given = json.loads(start.flag("resources"))
        if json.loads(params["resources"][1:-1].replace("\\", "")) != given:
            told.append(f"{role}: rayStartParams' resources are not those of `ray start`")
        cpus = int(start.flag("num-cpus"))
        limits = container(group)["resources"]["limits"]
        if not cpus == int(params["num-cpus"]) == int(limits["cpu"]):
            told.append(f"{role}: {cpus} CPUs for Ray, {limits['cpu']} of Kubernetes")
        demand = config.resources[role].amounts()  # type: ignore[index]  # one of the two
        for resource, amount in demand.items():
            if {"CPU": cpus, **given}.get(resource, 0) < amount:
                told.append(f"{role}: a worker asks for {amount:g} {resource}, its node has less")
        if not set(demand) - RESERVED:
            told.append(f"{role}: a worker may go anywhere")
        assert isinstance(config.autoscale, AutoscaleOptions)
        pool = getattr(config.autoscale, role)
        if (group["minReplicas"], group["maxReplicas"]) != (pool.min_workers, pool.max_workers):
            told.append(f"{role}: {group['minReplicas']}..{group['maxReplicas']} pods, not {pool}")
    nodes = 1 + sum(group["minReplicas"] for group in cluster["spec"]["workerGroupSpecs"])
    if config.await_nodes != nodes:
        told.append(f"the start awaits {config.await_nodes} nodes, there are {nodes}")
    if head["rayStartParams"]["num-cpus"] != "0":
        told.append("a worker may go to the head")
    return told


def wrong_hooks(found: Documents) -> list[str]:
    told = []
    for command in pod_commands(cluster_of(found)):
        group, _, part = command.place.partition(" ")
        if part != "preStop":
            continue
        grace = groups(cluster_of(found))[group]["template"]["spec"][
            "terminationGracePeriodSeconds"
        ]
        bound = float(command.flag("timeout") or command.flag("drain"))
        if grace < bound + 25:  # what is left then still has to end
            told.append(f"{group}: {grace} s to end in, and a drain of up to {bound:g} s")
    return told


def wrong_budgets(found: Documents) -> list[str]:
    """One for each group; `minAvailable` as a number is all that such pods may have."""
    told, covered = [], []
    for budget in of_kind(found, "PodDisruptionBudget"):
        chosen = selected(found, budget["spec"]["selector"]["matchLabels"])
        if len(chosen) != 1:
            told.append(f"{budget['metadata']['name']} is for {sorted(chosen)}, not for one group")
        covered += chosen
        if not isinstance(budget["spec"].get("minAvailable"), int):
            told.append(f"{budget['metadata']['name']}: minAvailable must be a number")
    if sorted(covered) != sorted(pods(found)):
        told.append(f"budgets are for {sorted(covered)}, not for each group once")
    return told


def test_the_manifests_are_right_and_agree() -> None:
    assert wrong(documents()) == []
    [listed] = of_kind(documents(), "Kustomization")
    there = {path.name for path in (DEPLOY / "kuberay").glob("*.yaml")}
    assert set(listed["resources"]) == there - {"kustomization.yaml"}


@pytest.mark.parametrize("name", ["headgroup", "prefill", "decode"])
def test_pods_have_no_more_rights_than_they_need(name: str) -> None:
    group = groups(cluster_of(documents()))[name]
    spec, box = group["template"]["spec"], container(group)
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert box["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["enableServiceLinks"] is False  # LEGATO_… of Services are no settings
    assert not any("hostPath" in volume for volume in spec["volumes"])
    assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
    [shm] = [v for v in spec["volumes"] if v["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    mounted = {mount["mountPath"] for mount in box["volumeMounts"]}
    assert mounted >= {"/dev/shm", "/tmp", "/home/legato"}
    assert {m["name"] for m in box["volumeMounts"]} == {v["name"] for v in spec["volumes"]}
    assert box["resources"]["requests"] == box["resources"]["limits"]
    tag = box["image"].rpartition(":")[2]
    assert "/" not in tag
    assert tag != "latest"


def test_ray_asks_for_a_token_everywhere_and_it_is_no_text_of_the_files() -> None:
    cluster = cluster_of(documents())
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    # The operator leaves alone what a container says of these itself.
    places = [container(group)["env"] for group in groups(cluster).values()]
    for env in [*places, cluster["spec"]["autoscalerOptions"].get("env", [])]:
        assert not {item["name"] for item in env} & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
    assert not of_kind(documents(), "Secret")


def test_the_operator_and_ray_mean_the_same_autoscaler() -> None:
    spec = cluster_of(documents())["spec"]
    assert spec["enableInTreeAutoscaling"]
    assert spec["autoscalerOptions"]["version"] == "v2"
    for group in groups(cluster_of(documents())).values():
        env = {item["name"] for item in container(group)["env"]}
        assert "RAY_enable_autoscaler_v2" not in env


def test_no_service_of_ours_is_taken_for_the_heads() -> None:
    """The operator makes none for the head where one with these two labels is there."""
    for one in of_kind(documents(), "Service"):
        labels = one["metadata"].get("labels", {})
        assert not labels.keys() >= {"ray.io/cluster", "ray.io/node-type"}


def test_a_service_that_is_not_ready_is_found_by_its_workers() -> None:
    spec = cluster_of(documents())["spec"]["headGroupSpec"]
    head = spec["headService"]
    # Kept as they are. The operator adds its selector, and the container's ports by their names.
    assert head["spec"] == {"clusterIP": "None", "publishNotReadyAddresses": True}
    name, _, port = "legato-head:6379".partition(":")
    assert head["metadata"]["name"] == name
    assert int(port) in container_ports(spec).values()
    starts = [c for c in pod_commands(cluster_of(documents())) if c.flag("address")]
    assert {c.flag("address") for c in starts} == {f"{name}:{port}"}
    for group in groups(cluster_of(documents())).values():
        env = {item["name"]: item.get("value") for item in container(group)["env"]}
        assert env["LEGATO_ADDRESS"] == f"{name}:{serve_words(documents())['port']}"
        assert env["LEGATO_TOKEN_FILE"] == serve_words(documents())["api_token_file"]


def head_box(found: Documents) -> dict[str, Any]:
    return container(groups(cluster_of(found))["headgroup"])


def worker(found: Documents) -> dict[str, Any]:
    return groups(cluster_of(found))["prefill"]


def args(found: Documents, old: str, new: str, group: str = "headgroup") -> None:
    box = container(groups(cluster_of(found))[group])
    assert old in box["args"][0]
    box["args"] = [box["args"][0].replace(old, new)]


def service(found: Documents, name: str) -> dict[str, Any]:
    [one] = [doc for doc in of_kind(found, "Service") if doc["metadata"]["name"] == name]
    spec: dict[str, Any] = one["spec"]
    return spec


PLANTED: dict[str, tuple[Callable[[Documents], Any], str]] = {
    "a misspelt key of KubeRay": (
        lambda d: worker(d).update(minReplica=1),
        "'minReplica' was unexpected",
    ),
    "a misspelt key of Kubernetes": (
        lambda d: head_box(d)["readinessProbe"].update(periodSecond=1),
        "'periodSecond' was unexpected",
    ),
    "a misspelt way to ask for a token": (
        lambda d: cluster_of(d)["spec"]["authOptions"].update(mode="tokens"),
        "'tokens' is not one of",
    ),
    "a key that the oldest operator does not have": (
        lambda d: cluster_of(d)["spec"]["authOptions"].update(secretName="legato-ray"),
        "'secretName' was unexpected",
    ),
    "metadata that are not kept": (
        lambda d: worker(d)["template"]["metadata"].update(generateName="p"),
        "'generateName' was unexpected",
    ),
    "a token from a Ray that knows none": (
        lambda d: cluster_of(d)["spec"].update(rayVersion="2.51.1"),
        "rayVersion must be 2.52.0 or newer",
    ),
    "a pod that starts again in place": (
        lambda d: worker(d)["template"]["spec"].update(restartPolicy="Always"),
        "prefill: restartPolicy must be Never",
    ),
    "resources at two places": (
        lambda d: worker(d).update(resources={"CPU": "8"}),
        "prefill: resources are in rayStartParams too",
    ),
    "resources that only Ray can read": (
        lambda d: worker(d)["rayStartParams"].update(resources='"{\\"prefill_node\\": 1}"'),
        "prefill: the operator cannot read",
    ),
    "a volume that the operator makes": (
        lambda d: worker(d)["template"]["spec"]["volumes"][2].update(name="shared-mem"),
        "prefill: shared-mem is a name of the operator's own",
    ),
    "a wrong type": (
        lambda d: worker(d).update(maxReplicas="4"),
        "'4' is not of type 'integer'",
    ),
    "a wrong type in a pod": (
        lambda d: head_box(d).update(args="legato"),
        "'legato' is not of type",
    ),
    "a number where Ray wants a text": (
        lambda d: worker(d)["rayStartParams"].update({"num-cpus": 8}),
        "8 is not of type 'string'",
    ),
    "something that is missing": (lambda d: worker(d).pop("template"), "'template' is a required"),
    "a misspelt key of a service": (
        lambda d: service(d, "legato-api").update(selectors={}),
        "'selectors' was unexpected",
    ),
    "a port of a service that no container has": (
        lambda d: service(d, "legato-api")["ports"][0].update(targetPort="grcp"),
        "legato-api: grcp is no port of headgroup",
    ),
    "another port than is served": (
        lambda d: args(d, "--port=50051", "--port=50052"),
        "grpc is no port of headgroup that is served",
    ),
    "a selector that matches no pod": (
        lambda d: service(d, "legato-api")["selector"].update({"ray.io/node-type": "haed"}),
        "legato-api selects no pod",
    ),
    "a budget that matches no pod": (
        lambda d: of_kind(d, "PodDisruptionBudget")[1]["spec"]["selector"]["matchLabels"].update(
            {"ray.io/group": "prefil"}
        ),
        "legato-prefill is for []",
    ),
    "a budget that Kubernetes refuses for such pods": (
        lambda d: of_kind(d, "PodDisruptionBudget")[2]["spec"].update(minAvailable="50%"),
        "legato-decode: minAvailable must be a number",
    ),
    "a probe of a port that nobody listens at": (
        lambda d: container(worker(d))["livenessProbe"]["grpc"].update(port=6381),
        "prefill: livenessProbe asks 6381",
    ),
    "a resource that the node lacks": (
        lambda d: args(d, "CPU=8,prefill_node=1", "CPU=8,prefil_node=1"),
        "prefill: a worker asks for 1 prefil_node",
    ),
    "more CPUs than the node has": (
        lambda d: args(d, "CPU=8,decode_node", "CPU=9,decode_node"),
        "decode: a worker asks for 9 CPU",
    ),
    "another resource for the autoscaler than for Ray": (
        lambda d: args(d, "prefill_node", "prefill_nodes", "prefill"),
        "prefill: rayStartParams' resources are not",
    ),
    "fewer pods than workers": (lambda d: worker(d).update(maxReplicas=2), "prefill: 1..2 pods"),
    "too short a time to end in": (
        lambda d: worker(d)["template"]["spec"].update(terminationGracePeriodSeconds=30),
        "prefill: 30 s to end in",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_found(name: str) -> None:
    plant, told = PLANTED[name]
    found = copy.deepcopy(documents())
    plant(found)
    assert any(told in problem for problem in wrong(found)), wrong(found)
