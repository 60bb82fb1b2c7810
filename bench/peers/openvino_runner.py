"""OpenVINO GenAI's continuous batching on the CPU; see host.py.

Exported by optimum-intel. Requests are added and `step` is called, so that token times are those
of the engine. KV is in the precision that the plugin chooses for the device.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import deque
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

    def __init__(self, path: str, precision: str, num_threads: int) -> None:
        self.version = f"openvino-genai {openvino_genai.__version__}"
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GB
        scheduler.max_num_batched_tokens = _BATCH_TOKENS
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

    def run(self, prompts: list[list[int]], num_at_once: int, max_tokens: int) -> dict[str, Any]:
        """Adds a request whenever a place is free; one step at a time."""
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = max_tokens
        settings.ignore_eos = True
        settings.do_sample = False
        waiting = deque(enumerate(prompts))
        requests: list[dict[str, Any]] = [{"token_times_s": [], "token_ids": []} for _ in prompts]
        handles: dict[int, Any] = {}
        while waiting or handles:
            while waiting and len(handles) < num_at_once:
                number, prompt = waiting.popleft()
                ids = ov.Tensor(np.array([prompt], dtype=np.int64))
                requests[number]["sent_s"] = time.perf_counter()
                handles[number] = self._pipeline.add_request(self._next_id, ids, settings)
                self._next_id += 1
            self._pipeline.step()
            now_s = time.perf_counter()
            for number, handle in list(handles.items()):
                request = requests[number]
                while handle.can_read():
                    for output in handle.read().values():
                        request["token_ids"] += list(output.generated_ids)
                        request["token_times_s"] += [now_s] * len(output.generated_ids)
                if len(request["token_ids"]) >= max_tokens:
                    del handles[number]
        return {"requests": requests}
