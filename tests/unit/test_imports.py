"""The edges of the import graph, and the modules that may never be imported at all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("bench", "cluster", "kernels", "protos", "text", "worker")
MAY_IMPORT = {
    "bench": {"cluster", "kernels", "protos", "text", "worker"},
    "cluster": {"protos", "text"},
    "kernels": set(),
    "protos": set(),
    "text": {"protos"},
    "worker": {"kernels", "protos", "text"},
}
# The one place of every Ray call; it hosts workers.
ACTORS = "cluster/actors/"
BANNED = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BANNED_CALLS = {"eval", "exec", "torch.load", "torch.save", "np.load", "numpy.load"}


def imported_modules(tree: ast.AST) -> set[str]:
    """Every module named in an import statement anywhere, also within functions."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # `from legato import worker` names the part among the imported names.
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("relative import")
    return found


def violations(path: str, source: str) -> list[str]:
    """What `source`, standing at `path`, imports or calls against the rules."""
    part = path.split("/")[0]
    tree = ast.parse(source)
    wrong = []
    for module in imported_modules(tree):
        names = module.split(".")
        if module == "relative import":
            wrong.append("relative import")
        elif names[0] in PARTS:
            wrong.append(f"{module}: import it as legato.{names[0]}")
        elif names[0] == "legato" and names[1] != part and names[1] not in MAY_IMPORT[part]:
            if not (path.startswith(ACTORS) and names[1] == "worker"):
                wrong.append(f"legato.{names[1]}")
        elif names[0] == "ray" and not path.startswith(ACTORS):
            wrong.append("ray")
        elif names[0] in BANNED:
            wrong.append(names[0])
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    wrong += [call for call in calls if call in BANNED_CALLS]
    return sorted(set(wrong))


def sources() -> list[str]:
    return sorted(
        str(path.relative_to(ROOT)) for part in PARTS for path in (ROOT / part).rglob("*.py")
    )


def test_there_are_sources_in_every_part() -> None:
    assert {path.split("/")[0] for path in sources()} == set(PARTS)
    assert any(path.startswith(ACTORS) for path in sources())


@pytest.mark.parametrize("path", sources())
def test_no_module_imports_or_calls_what_it_must_not(path: str) -> None:
    assert violations(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("worker/x.py", "import ray", ["ray"]),
        ("worker/x.py", "from ray.util import state", ["ray"]),
        ("cluster/x.py", "import ray", ["ray"]),
        ("worker/x.py", "def f():\n    import legato.cluster.router", ["legato.cluster"]),
        ("worker/x.py", "from legato import cluster", ["legato.cluster"]),
        ("cluster/x.py", "from legato.worker.config import WorkerConfig", ["legato.worker"]),
        ("cluster/x.py", "import legato.kernels.rms_norm", ["legato.kernels"]),
        ("kernels/x.py", "from legato.protos import common_pb2", ["legato.protos"]),
        ("protos/x.py", "import legato.worker.config", ["legato.worker"]),
        ("kernels/x.py", "import legato.cluster.config", ["legato.cluster"]),
        ("text/x.py", "import legato.cluster.errors", ["legato.cluster"]),
        ("text/x.py", "import legato.worker.engine", ["legato.worker"]),
        ("kernels/x.py", "import legato.text.guide", ["legato.text"]),
        ("worker/x.py", "import kernels", ["kernels: import it as legato.kernels"]),
        ("worker/x.py", "from .config import WorkerConfig", ["relative import"]),
        ("cluster/actors/x.py", "from legato.kernels import x", ["legato.kernels"]),
        ("worker/x.py", "import pickle", ["pickle"]),
        ("worker/x.py", "import torch\ntorch.load('x')", ["torch.load"]),
        ("cluster/x.py", "eval('1')", ["eval"]),
        ("cluster/actors/x.py", "import ray\nimport legato.worker.server", []),
        ("worker/x.py", "import legato.kernels.a\nfrom legato.protos import b", []),
        ("worker/x.py", "model.eval()", []),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str, found: list[str]) -> None:
    assert violations(path, source) == found
