"""The checked-in gRPC code is what protoc makes of the protos."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from legato.cluster.cluster_service import ClusterService
from legato.cluster.gateway import GenerationService
from legato.protos import kv_transfer_pb2
from legato.worker.services.control import ControlService
from legato.worker.services.decode import DecodeService
from legato.worker.services.kv_transfer import KvTransferService
from legato.worker.services.prefill import PrefillService

if TYPE_CHECKING:
    from collections.abc import Iterable

    import grpc

ROOT = Path(__file__).parents[2]
KINDS = ("python", "grpc_python", "mypy", "mypy_grpc")


def generate(out: Path, protos: Path) -> dict[str, bytes]:
    names = [f"legato/protos/{path.name}" for path in sorted(protos.glob("*.proto"))]
    scripts = Path(sys.executable).parent
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-Ilegato/protos={protos}"),
            f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
            *(f"--{kind}_out={out}" for kind in KINDS),
            *names,
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return {path.name: path.read_bytes() for path in (out / "legato/protos").iterdir()}


def checked_in() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (ROOT / "protos").glob("*_pb2*.py*")}


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    made, kept = generate(tmp_path, ROOT / "protos"), checked_in()
    assert made.keys() == kept.keys(), "run `make protos`"
    assert [name for name in made if made[name] != kept[name]] == [], "run `make protos`"


def test_a_changed_proto_would_be_noticed(tmp_path: Path) -> None:
    protos, out = tmp_path / "protos", tmp_path / "out"
    shutil.copytree(ROOT / "protos", protos)
    out.mkdir()
    file = protos / "cluster.proto"
    file.write_text(file.read_text().replace("int64 moved = 7;", "int64 moved_on = 7;"))
    made, kept = generate(out, protos), checked_in()
    changed = {name for name in made if made[name] != kept[name]}
    assert changed == {"cluster_pb2.py", "cluster_pb2.pyi"}


SERVICES = (
    ClusterService,
    ControlService,
    DecodeService,
    GenerationService,
    KvTransferService,
    PrefillService,
)


def stubs_of(service: type) -> dict[str, object]:
    """The methods that protoc has made for it: each only raises NotImplementedError."""
    generated = [base for base in service.__mro__ if base.__module__.endswith("_pb2_grpc")]
    return {n: m for base in generated for n, m in vars(base).items() if inspect.isfunction(m)}


class _Registry:
    """Takes a service's handlers as a server would."""

    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self.handlers += handlers


def registered_by_hand(service: type) -> list[str]:
    """The methods of a service that has no generated base, and takes its requests as bytes."""
    registry, made = _Registry(), object.__new__(service)
    made.add_to(registry)
    [name] = re.findall(r"(\w+)Service$", service.__name__)
    methods = kv_transfer_pb2.DESCRIPTOR.services_by_name[name].methods_by_name
    return [
        method
        for method in methods
        for handler in registry.handlers
        if handler.service(_Details(f"/legato.v1.{name}/{method}", ())) is not None
    ]


class _Details(NamedTuple):
    method: str
    invocation_metadata: tuple[()]


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.__name__)
def test_no_rpc_is_left_to_its_generated_stub(service: type) -> None:
    left = [name for name, stub in stubs_of(service).items() if getattr(service, name) is stub]
    assert left == []


def test_every_rpc_of_the_protos_has_a_service() -> None:
    text = "".join(path.read_text() for path in (ROOT / "protos").glob("*.proto"))
    served = sorted(
        name for service in SERVICES for name in stubs_of(service) or registered_by_hand(service)
    )
    assert served == sorted(re.findall(r"^  rpc (\w+)\(", text, re.MULTILINE))
    assert len(served) > 10
