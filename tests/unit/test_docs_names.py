"""Options and calls that the documents name in passing exist, and their KV arithmetic is ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

from legato.cluster.cli import app as cli
from legato.protos import cluster_pb2, generation_pb2, kv_transfer_pb2, worker_pb2
from legato.worker.kv.cache import KvShape

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")])
COMMANDS: dict[str, Any] = getattr(typer.main.get_command(cli.build_app()), "commands", {})
OURS = {o for c in COMMANDS.values() for p in c.params for o in (*p.opts, *p.secondary_opts)}
# Of our other programs: `python -m legato.worker`, the benchmarks.
SOURCES = [*ROOT.glob("worker/*.py"), *ROOT.glob("bench/**/*.py")]
PROGRAMS = set(re.findall(r'"(--[a-z][a-z-]+)"', "".join(path.read_text() for path in SOURCES)))
TYPERS = {"--help", "--version", "--install-completion", "--show-completion"}
DOCKERS = {"--gpus", "--target"}
RAYS = {"--block", "--num-gpus", "--node-manager-port", "--object-manager-port"} | {
    "--min-worker-port",
    "--max-worker-port",
}
MESSAGES = (cluster_pb2, generation_pb2, kv_transfer_pb2, worker_pb2)
TABLES = re.compile(r"^\| (?:vLLM|Dynamo) \|.*?(?:\n\n|\Z)", flags=re.DOTALL | re.MULTILINE)
SERVICES = {
    name: {method.name for method in service.methods}
    for module in MESSAGES
    for name, service in module.DESCRIPTOR.services_by_name.items()
}


def prose(text: str) -> str:
    """Without blocks, and without the tables of how options are called elsewhere."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return TABLES.sub("\n", text)


def elsewhere(text: str) -> str:
    """The last column of those tables: what is called so here."""
    return "\n".join(
        row.split(" | ")[-1] for table in TABLES.findall(text) for row in table.splitlines()
    )


def unknown_options(text: str) -> set[str]:
    quoted = re.findall(r"`([^`\n]+)`", prose(text) + elsewhere(text))
    # `ray start --head` is somebody else's.
    own = [part for part in quoted if re.match(r"-|legato |python -m legato", part)]
    named = {name for part in own for name in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", part)}
    return named - OURS - PROGRAMS - TYPERS - DOCKERS - RAYS


def unknown_calls(text: str) -> set[str]:
    named = re.findall(rf"\b({'|'.join(SERVICES)})[./]([A-Z]\w+)", text)
    return {f"{service}.{call}" for service, call in named if call not in SERVICES[service]}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_options_and_calls_in_prose_exist(path: Path) -> None:
    text = path.read_text()
    assert unknown_options(text) == set()
    assert unknown_calls(text) == set()


def test_wrong_names_are_found() -> None:
    text = "Give `--kv-memry 4GiB` and `--port`; `Cluster.ScalePol` is not `Cluster.ScalePool`."
    assert unknown_options(text) == {"--kv-memry"}
    assert unknown_calls(text) == {"Cluster.ScalePol"}
    table = "\n| vLLM | SGLang | Legato |\n|---|---|---|\n| `--model` | `--tp-size` | `--modl` |\n"
    assert unknown_options(table) == {"--modl"}
    assert set(SERVICES) >= {"Cluster", "Generation", "KvTransfer", "WorkerControl"}


def test_the_kv_of_a_token_is_what_the_concepts_say() -> None:
    text = (ROOT / "docs/concepts.md").read_text()
    rows = [row.split(" | ") for row in text.splitlines() if row.endswith("MiB |")]
    assert len(rows) == 5
    for name, layers, kv_heads, head_dim, element, token, context in rows:
        dtype = {"4": torch.float32, "2": torch.bfloat16, "1": torch.int8}[element[0]]
        shape = KvShape(int(layers), int(kv_heads), int(head_dim), block_size=16, dtype=dtype)
        assert shape.bytes_per_token == int(token.replace(",", "")), name
        mib = int(context.removesuffix(" MiB |").replace(",", ""))
        assert shape.context_bytes(8192) == mib << 20, name
