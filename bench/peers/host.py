"""The program that runs inside a peer's own environment: JSON lines in, JSON lines out.

    python -I host.py RUNNER.py

It imports nothing but the standard library, timed_engine.py and the runner beside it. The runner
imports the peer, and may import what lies beside it, where the peer has nothing of that name.
Requests, each answered by one line with `ok`:

    {"op": "prepare", "model", "precision", "work_dir"}       -> "path", null: no such precision
    {"op": "load", "path", "precision", "num_threads"}        -> "version"; "chunk" is optional
    {"op": "run", "prompts", "num_at_once", "max_tokens"}     -> "requests" and the runner's own
    {"op": "phase", "plan"}                                   -> a PhaseRecord

A request of the answer is {"sent_s", "token_times_s", "token_ids"}. What fails is answered with
{"ok": false, "error"}.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from types import ModuleType

_PR_SET_PDEATHSIG = 1


class Runner(Protocol):
    """What a runner's file defines: this class, `PRECISIONS` and `prepare`.

    `prepare(model, precision, work_dir)` brings a Hugging Face folder into the peer's own form
    and returns its path; what lies there from before is kept. An engine that is driven step by step
    is a `timed_engine.StepEngine`; it needs no `run`, and without being one it has no phases.
    """

    version: str

    def run(self, prompts: list[list[int]], num_at_once: int, max_tokens: int) -> dict[str, Any]:
        """Greedy, to the last token, at most `num_at_once` under way."""
        ...


def main() -> None:
    """Serves until standard input ends, or its parent does."""
    if sys.platform == "linux":  # a parent that is killed must not leave a peer computing
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not stand among the answers
    sys.path.append(str(Path(sys.argv[1]).parent))  # last: the peer's own modules come first
    module = _load_file(sys.argv[1])
    runner: Runner | None = None
    for line in sys.stdin:
        try:
            request = json.loads(line)
            runner, answer = _answer(module, runner, request)
            answer["ok"] = True
        except Exception as error:  # whatever a peer raises: the other side has to hear of it
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def _answer(
    module: ModuleType, runner: Runner | None, request: dict[str, Any]
) -> tuple[Runner | None, dict[str, Any]]:
    op = request.pop("op")
    if op == "prepare" and request["precision"] not in module.PRECISIONS:
        return runner, {"path": None}
    if op == "prepare":
        return runner, {"path": module.prepare(**request)}
    if op == "load":
        loaded: Runner = module.Runner(**request)
        return loaded, {"version": loaded.version}
    loops = _load_file(str(Path(__file__).with_name("timed_engine.py")))
    if op == "run" and runner is not None:
        if not hasattr(runner, "run"):
            return runner, loops.run_closed(runner, **request)
        return runner, runner.run(**request)
    if op == "phase" and runner is not None:
        return runner, loops.run_phase(runner, request["plan"])
    raise ValueError(f"op {op!r} is unknown, or comes before load")


def _load_file(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("runner", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
