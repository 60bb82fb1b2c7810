"""A service whose every connection is TLS, as `legato certs` and `legato serve` make it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from served import Served, legato
from tiny_models import make_llama_folder

from legato.protos import worker_pb2, worker_pb2_grpc
from legato.protos.internal_access import WORKER_NAME
from legato.protos.tls_files import TlsFiles

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

ASKED = ("generate", "--raw", "hello", "--temperature", "0", "--max-tokens", "8", "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_llama_folder(folder / "tiny")
    assert legato("certs", str(folder / "certs")).returncode == 0
    return folder


def pair(folder: Path, name: str, prefix: str = "--tls") -> tuple[str, ...]:
    certs = folder / "certs"
    return f"{prefix}-cert", f"{certs / name}.pem", f"{prefix}-key", f"{certs / name}.key"


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    words = ("--model", str(folder / "tiny"), "--kv-memory", "16MiB", "--threads", "1")
    tls = (*pair(folder, "service"), *pair(folder, "worker", "--worker-tls"))
    ca = ("--tls-ca", str(folder / "certs" / "ca.pem"))
    with Served(folder / "log", *words, *tls, *ca, "--kv-lane", "grpc") as service:
        yield service


def asked(served: Served, *words: str) -> Any:  # noqa: ANN401  # JSON
    result = legato(*ASKED, "--address", served.address, *words)
    return json.loads(result.stdout) if result.returncode == 0 else result.stderr


def test_clients_with_a_certificate_are_served_over_both_workers(
    served: Served, folder: Path
) -> None:
    ca = ("--tls-ca", str(folder / "certs" / "ca.pem"))
    answer = asked(served, *ca, *pair(folder, "client"))
    assert len(answer["token_ids"]) == 8
    assert answer["timings"]["kv_bytes_handed_over"] > 0
    assert answer["timings"]["prefill_worker"] != answer["timings"]["decode_worker"]
    assert "may want TLS" in asked(served)
    assert "may want a certificate" in asked(served, *ca)
    assert "KV" in served.output  # the owner has asked its own router


def test_a_clients_certificate_opens_no_worker(served: Served, folder: Path) -> None:
    words = ("--tls-ca", str(folder / "certs" / "ca.pem"), *pair(folder, "client"))
    status = json.loads(legato("status", "--json", "--address", served.address, *words).stdout)
    addresses = [worker["address"] for pool in status["pools"] for worker in pool["workers"]]
    assert len(addresses) == 2
    ca = str(folder / "certs" / "ca.pem")
    options = [("grpc.ssl_target_name_override", WORKER_NAME), ("grpc.enable_http_proxy", 0)]
    for address in addresses:
        stem = folder / "certs" / "client"
        tls = TlsFiles(f"{stem}.pem", f"{stem}.key", ca)
        with grpc.secure_channel(address, tls.channel_credentials(), options) as channel:
            with pytest.raises(grpc.RpcError) as raised:
                worker_pb2_grpc.WorkerControlStub(channel).Drain(
                    worker_pb2.DrainRequest(), timeout=10
                )
            # The secret, which is asked for first, it has neither.
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
            with pytest.raises(grpc.RpcError) as raised:
                worker_pb2_grpc.WorkerControlStub(channel).GetIdentity(
                    worker_pb2.GetIdentityRequest(), timeout=10
                )
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(asked(served, *words)["token_ids"]) == 8


def test_a_load_is_measured_by_grpc_and_by_http(served: Served, folder: Path) -> None:
    ca = ("--tls-ca", str(folder / "certs" / "ca.pem"), *pair(folder, "client"))
    found = re.search(r"OpenAI-compatible HTTP at (\S+)", served.output)
    assert found is not None, served.output
    load = ("--concurrency", "2", "--num-requests", "12", "--input-tokens", "8..16",
            "--output-tokens", "6", "--min-window", "0.001", "--json")  # fmt: skip
    for where in (("--address", served.address), ("--url", found[1])):
        ran = legato("bench", *where, *ca, *load)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        told = json.loads(ran.stdout)
        assert (told["ok"], told["warmup"]["requests"]) == (12, 2)
        assert told["verdict"]["given"]
        assert told["prompts"]["tokens"]["mean"] == told["prompts"]["planned_mean"]
        for name in ("queue_s", "prefill_model_s", "handoff_s", "delivery_s"):
            assert told["server"][name]["p50"] >= 0, (where, name)


def test_the_service_ends_by_the_clients_word_alone(served: Served, folder: Path) -> None:
    words = ("--tls-ca", str(folder / "certs" / "ca.pem"), *pair(folder, "client"))
    assert legato("stop", "--address", served.address).returncode == 1
    assert served.process.poll() is None
    result = legato("stop", "--address", served.address, *words)
    assert result.returncode == 0, result.stderr
    assert served.process.wait(30) == 0
