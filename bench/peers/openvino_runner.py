"""OpenVINO GenAI's continuous batching on the CPU; see host.py.

Exported by optimum-intel. Requests are added and `step` is called, so that token times are those
of the engine. KV is in the precision that the plugin chooses for the device.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai

_EXPORTS = {
    "fp32": ["--weight-format", "fp32"],
    "bf16": ["--weight-format", "fp16"],  # brought to bfloat16 when it is compiled
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--group-size", "64", "--ratio", "1.0"],
}
PRECISIONS = tuple(_EXPORTS)
_CACHE_GB = 2
_BATCH_TOKENS = 2048


def prepare(model: str, precision: str, work_dir: str) -> str:
    """An OpenVINO folder in `work_dir`."""
    target = Path(work_dir) / f"{Path(model).name}-openvino-{precision}"
    if not target.exists():
        part = target.with_name(target.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        command = [
            str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino",
            "--model", model, "--task", "text-generation-with-past",
            *_EXPORTS[precision], str(part),
        ]  # fmt: skip
        subprocess.run(command, check=True)  # its output goes to standard error: see host.py
        part.rename(target)
    return str(target)


class Runner:
    """One pipeline for all workloads."""

    def __init__(
        self, path: str, precision: str, num_threads: int, chunk: int | None = _BATCH_TOKENS
    ) -> None:
        """`chunk`: most tokens of a step; None: as the library has it."""
        self.version = f"openvino-genai {openvino_genai.__version__}"
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GB
        if chunk is not None:
            scheduler.max_num_batched_tokens = chunk
        scheduler.max_num_seqs = 256
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_NUM_THREADS": num_threads,
            "INFERENCE_PRECISION_HINT": "f32" if precision == "fp32" else "bf16",
            "PERFORMANCE_HINT": "LATENCY",
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            path, scheduler, "CPU", properties
        )
        self._next_id = 0
        self._handles: dict[int, Any] = {}
        self._left: dict[int, int] = {}  # tokens that are still to come

    def add(self, prompt: list[int], max_tokens: int) -> int:
        """Queues it for the next step."""
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = max_tokens
        settings.ignore_eos = True
        settings.do_sample = False
        number = self._next_id
        self._next_id += 1
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        self._handles[number] = self._pipeline.add_request(number, ids, settings)
        self._left[number] = max_tokens
        return number

    def step(self) -> list[tuple[int, list[int]]]:
        """One step of the pipeline."""
        self._pipeline.step()
        told: list[tuple[int, list[int]]] = []
        for number, handle in list(self._handles.items()):
            token_ids: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    token_ids += list(output.generated_ids)
            if token_ids:
                told.append((number, token_ids))
                self._left[number] -= len(token_ids)
            if self._left[number] <= 0:
                del self._handles[number]
        return told

    def cancel(self, number: int) -> None:
        """Its place is free after the next step."""
        handle = self._handles.pop(number, None)
        if handle is not None:
            handle.cancel()
