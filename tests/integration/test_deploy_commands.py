"""The commands of the deployment files run: nodes join, a request is answered, drains end well."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from deploy_files import DEPLOY, container, groups, ray_cluster, read_unit
from deployed import Deployed, container_env, free_ports, probe, terminate, wait_probe
from ray_head import TOKEN
from tiny_models import make_llama_folder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

STARTED = "Ray runtime started"


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
        process = self.deployed.start(name, words, container_env(box, address), address)
        # One after the other: nodes on one machine choose the names of their sockets by what is there.
        self.deployed.wait_for(name, STARTED)
        return process

    def pre_stop(self, name: str, group: str, address: str) -> subprocess.CompletedProcess[str]:
        box = container(self._groups[group])
        words = box["lifecycle"]["preStop"]["exec"]["command"]
        return self.deployed.run(words, container_env(box, address), address)

    def is_well(self, name: str, group: str, which: str, address: str) -> bool:
        """Its readinessProbe or livenessProbe."""
        self._swap_raylet(name)
        port = str(container(self._groups[group])[which]["grpc"]["port"])
        return probe(f"{address}:{self.deployed.swaps.get(port, port)}")

    def legato(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`kubectl exec` in the head's pod."""
        env = container_env(container(self._groups["headgroup"]), "127.0.0.1")
        return self.deployed.run(["legato", *words], env)

    def _swap_raylet(self, name: str) -> None:
        """Pods have all ports for themselves; here each raylet has another."""
        self.deployed.swaps["6380"] = self.raylet_ports[name]


def swaps(tmp_path: Path) -> dict[str, str]:
    """Model, tokens, addresses and ports."""
    model = make_llama_folder(tmp_path / "tiny", max_position_embeddings=1024)
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


def decode_hosts(status: str) -> list[str]:
    pools = json.loads(status)["pools"]
    return [w["address"].split(":")[0] for w in pools[1]["workers"]]


def test_pods_come_serve_and_go(tmp_path: Path) -> None:
    with Deployed(tmp_path, swaps(tmp_path)) as deployed:
        pods = Pods(deployed)
        head = pods.start("head", "headgroup", "127.0.0.1")
        prefill = pods.start("prefill", "prefill", "127.0.0.2")
        decode = pods.start("decode", "decode", "127.0.0.3")
        assert pods.is_well("head", "headgroup", "livenessProbe", "127.0.0.1")
        assert not pods.is_well("head", "headgroup", "readinessProbe", "127.0.0.1")
        refuses_without_a_token(f"127.0.0.1:{deployed.swaps['6379']}")
        wait_probe(f"127.0.0.1:{deployed.swaps['50051']}")
        assert pods.is_well("prefill", "prefill", "readinessProbe", "127.0.0.2")
        assert pods.is_well("decode", "decode", "livenessProbe", "127.0.0.3")
        assert decode_hosts(pods.legato("status", "--json").stdout) == ["127.0.0.3"]

        answer = pods.legato("generate", "Hello", "--max-tokens", "8", "--json")
        assert answer.returncode == 0, answer.stderr
        pods.start("decode-2", "decode", "127.0.0.4")
        drained = pods.pre_stop("decode", "decode", "127.0.0.3")
        assert drained.returncode == 0, drained.stderr
        assert "node 127.0.0.3 is without workers after" in drained.stdout
        terminate(decode)
        wait_probe(f"127.0.0.1:{deployed.swaps['50051']}")
        assert decode_hosts(pods.legato("status", "--json").stdout) == ["127.0.0.4"]
        assert pods.legato("generate", "Hello", "--max-tokens", "8", "--json").returncode == 0

        assert prefill.poll() is None
        ended = pods.pre_stop("head", "headgroup", "127.0.0.1")
        assert (ended.returncode, ended.stdout) == (0, "stopped\n"), ended.stderr
        assert head.wait(10) == 0, deployed.log("head")


def refuses_without_a_token(gcs: str) -> None:
    with grpc.insecure_channel(gcs) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        with pytest.raises(grpc.RpcError) as raised:
            ask(b"", timeout=5)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
