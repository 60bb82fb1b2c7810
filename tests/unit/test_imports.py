"""The edges of the import graph, and the modules that may never be imported at all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("bench", "cluster", "kernels", "plan", "protos", "text", "worker")
MAY_IMPORT = {
    "bench": {"cluster", "kernels", "plan", "protos", "text", "worker"},
    "cluster": {"protos", "text"},
    "kernels": set(),
    "plan": {"worker"},
    "protos": set(),
    "text": {"protos"},
    "worker": {"kernels", "protos", "text"},
}
# The one place of every Ray call; it hosts workers.
ACTORS = "cluster/actors/"
# Commands, of which some measure and plan.
COMMANDS = "cluster/cli/"
# It runs what the router decides by.
SIMULATION = "plan/simulation/"
# What runs code that comes in data.
BANNED = {
    *("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "xmlrpc", "jsonpickle"),
    *("multiprocessing.connection", "multiprocessing.managers", "ray.cloudpickle", "code", "runpy"),
}
BANNED_CALLS = {
    *("eval", "exec", "compile", "__import__", "execfile"),
    *("builtins.eval", "builtins.exec", "builtins.compile"),
    *("torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "torch.package"),
    *("np.load", "numpy.load", "np.fromregex", "pandas.read_pickle", "pd.read_pickle"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader"),
    *("os.system", "os.popen", "os.execl", "os.spawnl", "subprocess.getoutput"),
    *("subprocess.getstatusoutput", "asyncio.create_subprocess_shell", "commands.getoutput"),
}
BANNED_METHODS = {"recv_pyobj", "send_pyobj", "read_pickle", "to_pickle"}
BANNED_WORDS = ("trust_remote_code",)  # Hub code is never run: the word stands nowhere


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
            of_actors = path.startswith(ACTORS) and names[1] == "worker"
            of_commands = path.startswith(COMMANDS) and names[1] in ("bench", "plan")
            of_simulation = path.startswith(SIMULATION) and names[1] in ("cluster", "protos")
            if not (of_actors or of_commands or of_simulation):
                wrong.append(f"legato.{names[1]}")
        elif names[0] == "ray" and not path.startswith(ACTORS):
            wrong.append("ray")
        elif banned := {names[0], ".".join(names[:2])} & BANNED:
            wrong += banned
        elif module in BANNED_CALLS:  # by its bare name later
            wrong.append(module)
    for node in ast.walk(tree):
        # Also where it is handed on and not called here.
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in BANNED_CALLS:
            wrong.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and node.attr in BANNED_METHODS:
            wrong.append(node.attr)
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            wrong.append("shell")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            wrong.append("allow_pickle")
    wrong += [word for word in BANNED_WORDS if word in source]
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
        ("cluster/x.py", "import legato.plan.answer", ["legato.plan"]),
        ("cluster/cli/x.py", "import legato.plan.answer\nimport legato.bench.load", []),
        ("cluster/cli/x.py", "import legato.worker.config", ["legato.worker"]),
        ("plan/x.py", "import legato.cluster.config", ["legato.cluster"]),
        ("plan/simulation/x.py", "import legato.cluster.config", []),
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
        ("cluster/x.py", "run = exec", ["exec"]),
        ("cluster/x.py", "map(eval, lines)", ["eval"]),
        ("cluster/x.py", "import builtins\nbuiltins.eval('1')", ["builtins.eval"]),
        ("cluster/x.py", "__import__('pickle')", ["__import__"]),
        ("worker/x.py", "from torch import load", ["torch.load"]),
        ("worker/x.py", "from pickle import loads", ["pickle"]),
        ("worker/x.py", "import torch\ntorch.jit.load('x')", ["torch.jit.load"]),
        ("worker/x.py", "socket.recv_pyobj()", ["recv_pyobj"]),
        ("worker/x.py", "f(allow_pickle=True)", ["allow_pickle"]),
        ("cluster/x.py", "import yaml\nyaml.load(x)", ["yaml.load"]),
        ("cluster/x.py", "import yaml\nyaml.safe_load(x)", []),
        ("cluster/x.py", "import subprocess\nsubprocess.run('ls', shell=True)", ["shell"]),
        ("cluster/x.py", "import os\nos.system('ls')", ["os.system"]),
        (
            "cluster/x.py",
            "from multiprocessing.connection import Client",
            ["multiprocessing.connection"],
        ),
        ("cluster/actors/x.py", "import ray.cloudpickle", ["ray.cloudpickle"]),
        ("cluster/x.py", "load(path, trust_remote_code=False)", ["trust_remote_code"]),
        ("cluster/x.py", "import re\nre.compile('x')", []),
        ("cluster/actors/x.py", "import ray\nimport legato.worker.server", []),
        ("worker/x.py", "import legato.kernels.a\nfrom legato.protos import b", []),
        ("worker/x.py", "model.eval()", []),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str, found: list[str]) -> None:
    assert violations(path, source) == found
