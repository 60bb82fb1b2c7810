"""The commands of the deployment files run: nodes join, a request is answered, drains end well."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import yaml
from deploy_files import DEPLOY, container, groups, ray_cluster, read_unit
from deployed import (
    Deployed,
    container_env,
    operator_env,
    probe,
    terminate,
    wait_probe,
)
from ports import free_ports
from ray_head import TOKEN
from tiny_models import make_llama_folder

from legato.cluster.client import Client, Tokens
from legato.cluster.client_access import ClientAccess
from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.integration

STARTED = "Ray runtime started"
# Decoded for longer than a drain takes to begin; it ends where it is, or moves.
LONG = generation_pb2.GenerateRequest(
    text="Hello", sampling=common_pb2.SamplingParams(max_tokens=2000, ignore_eos=True)
)


class Pods:
    """The pods of the RayCluster, without Kubernetes: each a process, at an address of its own."""

    def __init__(self, deployed: Deployed) -> None:
        self.deployed = deployed
        self._groups = groups(ray_cluster())
        self.raylet_ports: dict[str, str] = {}

    def start(self, name: str, group: str, address: str) -> subprocess.Popen[bytes]:
        box = container(self._groups[group])
        [self.raylet_ports[name]] = free_ports(1)
        self._swap_raylet(name)
        words = [*box["command"], *box["args"]]
        process = self.deployed.start(name, words, self._env(name, group, address), address)
        # One after the other: nodes on one machine name their sockets by what is there.
        self.deployed.wait_for(name, STARTED)
        return process

    def pre_stop(self, name: str, group: str, address: str) -> subprocess.CompletedProcess[str]:
        box = container(self._groups[group])
        words = box["lifecycle"]["preStop"]["exec"]["command"]
        return self.deployed.run(words, self._env(name, group, address), address)

    def is_well(self, name: str, group: str, which: str, address: str) -> bool:
        """Its readinessProbe or livenessProbe."""
        self._swap_raylet(name)
        port = str(container(self._groups[group])[which]["grpc"]["port"])
        return probe(f"{address}:{self.deployed.swaps.get(port, port)}")

    def wait_until_gone(self, name: str, group: str, address: str) -> None:
        """Ray's process on the node; of a pod that still runs."""
        deadline_s = time.monotonic() + 20
        while self.is_well(name, group, "livenessProbe", address):
            assert time.monotonic() < deadline_s, self.deployed.log(name)
            time.sleep(0.1)

    def drain(self, node: str) -> subprocess.CompletedProcess[str]:
        """As an operator does, in the head's pod."""
        return self.deployed.run(["legato", "drain", "--node", node], self._exec_env())

    def status(self) -> dict[str, Any]:
        """`kubectl exec … legato status --json` in the head's pod."""
        done = self.deployed.run(["legato", "status", "--json"], self._exec_env())
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    def client(self) -> Client:
        """With a token, without TLS."""
        token = Path(self.deployed.swaps["/etc/legato/api/tokens"]).read_text().strip()
        return Client(f"127.0.0.1:{self.deployed.swaps['50051']}", access=ClientAccess(token))

    def _exec_env(self) -> dict[str, str]:
        return self._env("head", "headgroup", "127.0.0.1")

    def _env(self, name: str, group: str, address: str) -> dict[str, str]:
        added = operator_env(ray_cluster(), group, name)
        return {**added, **container_env(container(self._groups[group]), address)}

    def _swap_raylet(self, name: str) -> None:
        """Pods have all ports for themselves; here each raylet has another."""
        self.deployed.swaps["6380"] = self.raylet_ports[name]


def swaps(tmp_path: Path) -> dict[str, str]:
    """Model, tokens, addresses and ports."""
    model = make_llama_folder(tmp_path / "tiny", max_position_embeddings=2048)
    tokens = tmp_path / "tokens"
    tokens.write_text(secrets.token_hex(32))
    (tmp_path / "ray-token").write_text(TOKEN)
    gcs, api, http = free_ports(3)
    return {
        "/models/m": str(model),
        "/etc/legato/api/tokens": str(tokens),
        "/etc/legato/api-token": str(tokens),
        "legato-head": "127.0.0.1",
        "192.0.2.1": "127.0.0.1",
        "6379": gcs,
        "50051": api,
        "51051": http,
    }


def decode_hosts(pods: Pods) -> list[str]:
    return [w["address"].split(":")[0] for w in pods.status()["pools"][1]["workers"]]


def test_pods_come_serve_and_go(tmp_path: Path) -> None:
    with Deployed(tmp_path, swaps(tmp_path)) as deployed:
        pods = Pods(deployed)
        api = f"127.0.0.1:{deployed.swaps['50051']}"
        head = pods.start("head", "headgroup", "127.0.0.1")
        assert pods.is_well("head", "headgroup", "livenessProbe", "127.0.0.1")
        assert not pods.is_well("head", "headgroup", "readinessProbe", "127.0.0.1")
        refuses_without_a_token(f"127.0.0.1:{deployed.swaps['6379']}")
        pods.start("prefill", "prefill", "127.0.0.2")
        leaving = pods.start("decode", "decode", "127.0.0.3")
        wait_probe(api)
        assert pods.is_well("head", "headgroup", "readinessProbe", "127.0.0.1")
        assert pods.is_well("prefill", "prefill", "readinessProbe", "127.0.0.2")
        assert pods.is_well("decode", "decode", "livenessProbe", "127.0.0.3")
        assert decode_hosts(pods) == ["127.0.0.3"]

        pods.start("decode-2", "decode", "127.0.0.4")
        with pods.client() as client, ThreadPoolExecutor(1) as aside:
            stream = client.stream(LONG)
            first = next(stream)
            assert isinstance(first, Tokens)
            amid = aside.submit(stream.result)
            drained = pods.pre_stop("decode", "decode", "127.0.0.3")
            token_ids = [*first.token_ids, *amid.result(120).token_ids]
            assert len(token_ids) == LONG.sampling.max_tokens
        assert drained.returncode == 0, drained.stderr
        assert "node 127.0.0.3 is without workers after" in drained.stdout
        pods.wait_until_gone("decode", "decode", "127.0.0.3")  # for Ray, too, by its own
        terminate(leaving)
        refuses_the_services_own_node(pods)
        wait_probe(api)
        assert decode_hosts(pods) == ["127.0.0.4"]
        assert pods.status()["router"]["failed"] == 0

        ended = pods.pre_stop("head", "headgroup", "127.0.0.1")
        assert (ended.returncode, ended.stdout) == (0, "stopped\n"), ended.stderr
        assert head.wait(10) == 0, deployed.log("head")


FULL = pytest.mark.skipif(
    os.environ.get("LEGATO_DEPLOY") != "full", reason="`make test-deploy` runs it"
)


class Machines:
    """The machines of the units, without systemd."""

    def __init__(self, deployed: Deployed) -> None:
        self.deployed = deployed

    def start(self, name: str, address: str) -> subprocess.Popen[bytes]:
        words = self._words(name, "ExecStart")
        return self.deployed.start(name, words, self._env(name), address)

    def stop(
        self, name: str, process: subprocess.Popen[bytes], address: str
    ) -> subprocess.CompletedProcess[str] | None:
        """ExecStop where there is one; then SIGTERM, which must end it well."""
        told = None
        if "ExecStop" in read_unit(self._path(name))["Service"]:
            self.deployed.swaps["%H"] = address
            words = self._words(name, "ExecStop")
            told = self.deployed.run(words, self._env(name), address)
        fine = read_unit(self._path(name))["Service"].get("SuccessExitStatus", "0").split()
        assert str(terminate(process)) in {"0", *fine}, self.deployed.log(name)
        return told

    def _words(self, name: str, key: str) -> list[str]:
        line = read_unit(self._path(name))["Service"][key].removeprefix("-")
        words = shlex.split(line)
        if words[:1] and words[0].endswith("/ray"):  # whose address is swapped in as a shell's is
            return ["/bin/sh", "-c", f"exec {line.removeprefix('/opt/legato/.venv/bin/')}"]
        return [words[0].rpartition("/")[2], *words[1:]]

    def _env(self, name: str) -> dict[str, str]:
        given = read_unit(self._path(name))["Service"]["Environment"].split()
        return dict(item.split("=", 1) for item in given if not item.startswith("HOME="))

    def _path(self, name: str) -> Path:
        return DEPLOY / "systemd" / f"{name}.service"


@FULL
def test_units_start_serve_and_stop(tmp_path: Path) -> None:
    here = swaps(tmp_path)
    config = tmp_path / "two-machines.yaml"
    text = (DEPLOY / "examples" / config.name).read_text()
    for given in ("/models/m", "/etc/legato/api-token", "6379"):
        assert given in text
        text = text.replace(given, here[given])
    config.write_text(f"{text}port: {here['50051']}\nhttp_port: {here['51051']}\n")
    more = {f"/etc/legato/{config.name}": str(config), "%d": str(tmp_path)}
    (tmp_path / "api-token").write_text((tmp_path / "tokens").read_text())
    with Deployed(tmp_path, {**here, **more}) as deployed:
        machines = Machines(deployed)
        head = machines.start("legato-ray-head", "127.0.0.1")
        deployed.wait_for("legato-ray-head", STARTED)
        service = machines.start("legato-cluster", "127.0.0.1")
        decode = machines.start("legato-decode", "127.0.0.3")
        api = f"127.0.0.1:{here['50051']}"
        wait_probe(api)
        words = ["legato", "generate", "Hello", "--max-tokens", "8", "--address", api]
        token = {"LEGATO_TOKEN_FILE": str(tmp_path / "tokens")}
        answer = deployed.run(words, token)
        assert answer.returncode == 0, answer.stderr
        drained = machines.stop("legato-decode", decode, "127.0.0.3")
        assert drained is not None
        assert drained.returncode == 0, drained.stderr
        assert "node 127.0.0.3 is without workers after" in drained.stdout
        machines.stop("legato-cluster", service, "127.0.0.1")
        assert "ended" in deployed.log("legato-cluster")
        machines.stop("legato-ray-head", head, "127.0.0.1")


@FULL
def test_what_ray_up_runs_makes_a_cluster(tmp_path: Path) -> None:
    file = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
    more = {"/opt/legato/.venv/bin/": "", "$RAY_HEAD_IP": "127.0.0.1"}
    env = {"RAY_AUTH_TOKEN": TOKEN}
    with Deployed(tmp_path, {**swaps(tmp_path), **more}) as deployed:
        for which, address in (("head", "127.0.0.1"), ("worker", "127.0.0.2")):
            stop, start = file[f"{which}_start_ray_commands"]
            assert stop.endswith("/ray stop")  # not here: it would end others' as well
            done = deployed.run(["/bin/bash", "-c", start], env, address)
            assert done.returncode == 0, done.stdout + done.stderr
        refuses_without_a_token(f"127.0.0.1:{deployed.swaps['6379']}")


def test_rays_autoscaler_reads_the_groups() -> None:
    from ray.autoscaler._private.kuberay import autoscaling_config

    read = autoscaling_config._generate_available_node_types_from_ray_cr_spec
    kinds = read(ray_cluster()["spec"])
    wanted = {
        "prefill": ({"CPU": 8, "prefill_node": 1}, 4),
        "decode": ({"CPU": 8, "decode_node": 1}, 8),
    }
    for name, (resources, most) in wanted.items():
        kind = kinds[name]
        assert {key: kind["resources"][key] for key in resources} == resources
        assert (kind["min_workers"], kind["max_workers"]) == (1, most)
    assert kinds["headgroup"]["resources"]["CPU"] == 0


def refuses_the_services_own_node(pods: Pods) -> None:
    [head] = re.findall(r"Local node IP: (\S+)", pods.deployed.log("head"))
    refused = pods.drain(head)
    assert refused.returncode == 1
    assert "is where the service was started: end the service instead" in refused.stderr


def refuses_without_a_token(gcs: str) -> None:
    with grpc.insecure_channel(gcs) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        with pytest.raises(grpc.RpcError) as raised:
            ask(b"", timeout=5)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
