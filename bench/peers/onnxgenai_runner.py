"""ONNX Runtime GenAI's engine on the CPU; see host.py.

Its own model builder makes the files from a local folder, without a hub.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og

# It has no bfloat16 on CPUs: the builder writes such a model, whose operators the runtime lacks.
PRECISIONS = ("fp32", "int8", "int4")
_EVENTS = 64
_MAX_BATCH = 8


def prepare(model: str, precision: str, work_dir: str) -> str:
    """A folder in `work_dir`."""
    target = Path(work_dir) / f"{Path(model).name}-onnxgenai-{precision}"
    if not target.exists():
        part = target.with_name(target.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        command = [
            sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", model, "-o", str(part),
            "-p", precision, "-e", "cpu", "-c", str(part.with_suffix(".cache")),
        ]  # fmt: skip
        subprocess.run(command, check=True)  # its output goes to standard error: see host.py
        part.rename(target)
    return str(target)


class Runner:
    """One engine for all workloads.

    On CPUs it batches statically: who comes while a batch runs waits until all of it has ended.
    """

    def __init__(self, path: str, precision: str, num_threads: int, chunk: None = None) -> None:
        self.version = f"onnxruntime-genai {og.__version__}, {precision}"
        config = og.Config(path)
        threads = {"intra_op_num_threads": num_threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
        batching = {"static_batching": {"max_batch_size": _MAX_BATCH}}
        config.overlay(json.dumps({"engine": batching}))
        self._model = og.Model(config)
        self._engine = og.Engine(self._model)
        self._events = self._engine.create_event_buffer(_EVENTS)
        self._next = 0
        self._turns: dict[int, tuple[Any, int]] = {}  # request and turn, by number

    def add(self, prompt: list[int], max_tokens: int) -> int:
        """Queues it for the next batch."""
        options = og.RequestOptions()
        options.set_max_session_tokens(len(prompt) + max_tokens)
        request = self._engine.create_request(options=options)
        settings = og.TurnOptions(request)
        settings.set_do_sample(False)
        settings.set_max_generated_tokens(max_tokens)
        settings.set_min_generated_tokens(max_tokens)  # no end of sequence before it
        turn = request.begin_turn(np.array(prompt, dtype=np.int32), settings)
        number = self._next
        self._next += 1
        self._turns[number] = (request, turn)
        return number

    def step(self) -> list[tuple[int, list[int]]]:
        """One run of the engine."""
        if not self._engine.has_pending_requests():
            raise RuntimeError("nothing is under way")
        told: dict[int, list[int]] = {}
        for event in self._engine.run(self._events):
            if int(event.flags) & int(og.EngineEventFlags.TOKEN):
                for number, (request, _) in self._turns.items():
                    if request == event.request:
                        told.setdefault(number, []).append(int(event.token))
        return list(told.items())

    def cancel(self, number: int) -> None:
        """It ends before the next run."""
        request, turn = self._turns.pop(number)
        request.cancel_turn(turn)
        request.close()
