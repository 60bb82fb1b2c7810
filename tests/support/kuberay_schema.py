"""RayCluster's schema: KubeRay's own keys (ray.io/v1), and what its operator refuses beyond them.

Checked against the API reference of KubeRay v1.6.2 (of its commit 0a9eabde, whose date is not
known), and, for which keys are required and for the operator's own checks, against sources of its
main branch after that release. Keys that came later (ingressOptions, priority, networkPolicy,
tlsOptions, historyServerOptions, the autoscaler's command and args, other stores than Redis) are
refused here, and so is what authOptions did not have in v1.5.1, the oldest release that the
manifests are for. The status, which the operator alone writes, is left out. What is Kubernetes' in
it (pods, services, resources) is by Kubernetes' own schema, and as strict; so are enumerations
that KubeRay leaves to it, and counts, of which the operator refuses negative ones.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import jsonschema
import kubernetes_validate
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

if TYPE_CHECKING:
    from collections.abc import Mapping

KUBERNETES = "1.34"  # the oldest that is still served; the schemas are of this version
_CORE = "k8s#/$defs/io.k8s.api.core.v1."
_META = "k8s#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1."
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_FLAG = {"type": "boolean"}
_TEXT = {"type": "string"}


def _keys(required: tuple[str, ...] = (), **properties: object) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _core(name: str) -> dict[str, str]:
    return {"$ref": _CORE + name}


# All that is kept of the metadata of objects within a RayCluster.
_METADATA = _keys(
    annotations=_TEXTS,
    finalizers={"type": "array", "items": _TEXT},
    labels=_TEXTS,
    name=_TEXT,
    namespace=_TEXT,
)
_POD = _keys(metadata=_METADATA, spec=_core("PodSpec"))
_SERVICE = _keys(  # the operator fills in what is not said, apiVersion and kind included
    apiVersion={"const": "v1"},
    kind={"const": "Service"},
    metadata=_METADATA,
    spec=_core("ServiceSpec"),
)
_HEAD = _keys(
    ("template",),
    enableIngress=_FLAG,
    headService=_SERVICE,
    labels=_TEXTS,
    rayStartParams=_TEXTS,
    resources=_TEXTS,
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    template=_POD,
)
_WORKERS = _keys(
    # minReplicas and maxReplicas have defaults, which count as said.
    ("groupName", "template"),
    groupName=_TEXT,
    idleTimeoutSeconds=_COUNT,
    labels=_TEXTS,
    maxReplicas=_COUNT,
    minReplicas=_COUNT,
    numOfHosts=_COUNT,
    rayStartParams=_TEXTS,
    replicas=_COUNT,
    resources=_TEXTS,
    scaleStrategy=_keys(workersToDelete={"type": "array", "items": _TEXT}),
    suspend=_FLAG,
    template=_POD,
)
_AUTOSCALER = _keys(
    env={"type": "array", "items": _core("EnvVar")},
    envFrom={"type": "array", "items": _core("EnvFromSource")},
    idleTimeoutSeconds=_COUNT,
    image=_TEXT,
    imagePullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
    resources=_core("ResourceRequirements"),
    securityContext=_core("SecurityContext"),
    upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    version={"enum": ["v1", "v2"]},
    volumeMounts={"type": "array", "items": _core("VolumeMount")},
)
_CREDENTIAL = _keys(value=_TEXT, valueFrom=_core("EnvVarSource"))
RAY_CLUSTER = _keys(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata={"$ref": _META + "ObjectMeta"},
    spec=_keys(
        ("headGroupSpec",),
        authOptions=_keys(mode={"enum": ["disabled", "token"]}),
        autoscalerOptions=_AUTOSCALER,
        enableInTreeAutoscaling=_FLAG,
        gcsFaultToleranceOptions=_keys(
            ("redisAddress",),
            externalStorageNamespace=_TEXT,
            redisAddress=_TEXT,
            redisPassword=_CREDENTIAL,
            redisUsername=_CREDENTIAL,
        ),
        headGroupSpec=_HEAD,
        headServiceAnnotations=_TEXTS,
        managedBy={"enum": ["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"]},
        rayVersion=_TEXT,
        suspend=_FLAG,
        upgradeStrategy=_keys(type={"enum": ["Recreate", "None"]}),
        workerGroupSpecs={"type": "array", "items": _WORKERS},
    ),
)
KUSTOMIZATION = _keys(
    ("apiVersion", "kind", "resources"),
    apiVersion={"const": "kustomize.config.k8s.io/v1beta1"},
    kind={"const": "Kustomization"},
    resources={"type": "array", "items": _TEXT},
)


def problems(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a document by its kind's schema: path and sentence; unknown keys too."""
    own = {"RayCluster": RAY_CLUSTER, "Kustomization": KUSTOMIZATION}.get(document["kind"])
    if own is None:
        try:
            kubernetes_validate.validate(dict(document), KUBERNETES, strict=True)
        except jsonschema.ValidationError as error:
            return [_line(error)]
        return []
    validator = jsonschema.Draft202012Validator(own, registry=_registry())
    return sorted(_line(error) for error in validator.iter_errors(document))


def refusals(cluster: Mapping[str, Any]) -> list[str]:
    """What the operator refuses, or quietly does without, in a RayCluster that its schema takes."""
    spec = cluster["spec"]
    told = []
    if spec.get("authOptions", {}).get("mode") == "token":
        version = [int(part) for part in spec.get("rayVersion", "0").split(".")[:2]]
        if version < [2, 52]:
            told.append("authOptions: rayVersion must be 2.52.0 or newer")
    head = spec["headGroupSpec"]
    named = {"head": head, **{g["groupName"]: g for g in spec.get("workerGroupSpecs", [])}}
    v2 = spec.get("autoscalerOptions", {}).get("version") == "v2"
    for name, group in named.items():
        params, pod = group.get("rayStartParams", {}), group["template"]["spec"]
        if v2 and pod.get("restartPolicy", "Never") != "Never":
            told.append(f"{name}: restartPolicy must be Never, or not be said, with autoscaler v2")
        if group.get("resources") and params.keys() & {
            "num-cpus",
            "num-gpus",
            "memory",
            "resources",
        }:
            told.append(f"{name}: resources are in rayStartParams too")
        if "labels" in params:
            told.append(f"{name}: labels may not be in rayStartParams")
        if group.get("minReplicas", 0) > group.get("maxReplicas", 2**31 - 1):
            told.append(f"{name}: minReplicas is more than maxReplicas")
        try:
            json.loads(params.get("resources", "{}").strip("'\"` "))
        except ValueError:
            told.append(f"{name}: the operator cannot read rayStartParams' resources")
        taken = {v["name"] for v in pod.get("volumes", [])} & {"shared-mem", "ray-logs"}
        taken |= {c["name"] for c in pod["containers"]} & {"autoscaler"}
        told += [f"{name}: {each} is a name of the operator's own" for each in sorted(taken)]
    return told


@cache
def _registry() -> Registry[Any]:
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema"
    named = f"v{KUBERNETES}.0-local-strict"
    text = (folder / named / "_definitions.json").read_text()
    return Registry().with_resource("k8s", Resource(json.loads(text), DRAFT202012))


def _line(error: jsonschema.ValidationError) -> str:
    return f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}"
