"""Generated code and reference are what the protos say, which are clean and break no client."""

from __future__ import annotations

import importlib.util
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
from legato.protos import cluster_pb2, common_pb2, generation_pb2, kv_transfer_pb2
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


# --- buf --------------------------------------------------------------------------------------


def buf(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a checkout as `buf.yaml` expects it, whose protos are those of `folder`."""
    checkout = folder.parent / "checkout"
    links = checkout / "build" / "ns" / "legato"
    if not links.exists():
        links.mkdir(parents=True)
        (links / "protos").symlink_to(folder)
        shutil.copy(ROOT / "buf.yaml", checkout)
    command = [str(Path(sys.executable).parent / "buf"), *words]
    return subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def protos(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "protos", tmp_path / "protos"))


BREAKING = ("breaking", "--against", str(ROOT / "protos/released.binpb"))


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_buf_finds_nothing_to_lint(protos: Path) -> None:
    result = buf(protos, "lint")
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_no_released_client_is_broken(protos: Path) -> None:
    result = buf(protos, *BREAKING)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("cluster", "string model = 1;", "string Model = 1;"),
        ("generation", "// What an answer has cost, in tokens.\n", ""),
    ],
)
def test_what_is_unclean_would_be_found(protos: Path, file: str, old: str, new: str) -> None:
    change(protos / f"{file}.proto", old, new)
    assert buf(protos, "lint").returncode != 0


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("generation", "int32 cached_prompt_tokens = 4;", "int64 cached_prompt_tokens = 4;"),
        ("common", "optional float temperature = 2;", ""),
        ("generation", "rpc GetModel(GetModelRequest)", "rpc GetTheModel(GetModelRequest)"),
        ("common", "PRIORITY_BATCH = 2;", "PRIORITY_BULK = 2;"),
    ],
)
def test_what_breaks_clients_would_be_found(protos: Path, file: str, old: str, new: str) -> None:
    change(protos / f"{file}.proto", old, new)
    assert buf(protos, *BREAKING).returncode != 0


def test_what_is_added_breaks_nobody(protos: Path) -> None:
    change(
        protos / "generation.proto",
        "int32 cached_prompt_tokens = 4;",
        "int32 cached_prompt_tokens = 4; int32 more = 99;",
    )
    assert buf(protos, *BREAKING).returncode == 0


# --- the reference ----------------------------------------------------------------------------


def reference(protos: Path) -> str:
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / "docs/api_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text: str = module.reference(protos)
    return text


def test_the_reference_is_up_to_date() -> None:
    assert (ROOT / "docs/api-reference.md").read_text() == reference(ROOT / "protos"), (
        "run `make protos`"
    )


def test_the_reference_has_every_field_method_and_value() -> None:
    text = (ROOT / "docs/api-reference.md").read_text()
    for file in (generation_pb2, cluster_pb2, common_pb2):
        for message in file.DESCRIPTOR.message_types_by_name.values():
            assert f"### {message.name}\n" in text
            assert all(nested.GetOptions().map_entry for nested in message.nested_types)
            assert not message.enum_types, "the reference has no place for one inside a message"
            for field in message.fields:
                assert re.search(rf"^\| `{field.name}` \| .* \| {field.number} \|", text, re.M)
        for enum in file.DESCRIPTOR.enum_types_by_name.values():
            for value in enum.values:
                assert f"| `{value.name}` | {value.number} |" in text
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                assert f"### {service.name}.{method.name}\n" in text


def test_a_changed_comment_would_be_noticed(protos: Path) -> None:
    change(protos / "generation.proto", "what an answer has cost".capitalize(), "What it has cost")
    assert reference(protos) != (ROOT / "docs/api-reference.md").read_text()


# --- services ---------------------------------------------------------------------------------


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
