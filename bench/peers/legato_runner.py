"""Our own bare engine behind the peers' protocol; see host.py."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from legato.bench.bare_engine import BareEngine
from legato.bench.engine import worker_config

_SETTINGS: dict[str, dict[str, object]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "weights": "int8"},
    "int4": {"dtype": "bfloat16", "weights": "int4"},
}
PRECISIONS = tuple(_SETTINGS)
_KV_MEMORY_BYTES = 2 << 30


def prepare(model: str, precision: str, work_dir: str) -> str:
    """The folder itself."""
    return model


class Runner:
    """An engine on the CPU."""

    def __init__(self, path: str, precision: str, num_threads: int) -> None:
        self.version = "legato, as it stands here"
        self._engine = BareEngine(
            worker_config(
                {
                    "model": path,
                    "role": "prefill",
                    "device": "cpu",
                    "num_threads": num_threads,
                    "kv_memory_bytes": _KV_MEMORY_BYTES,
                    **_SETTINGS[precision],
                }
            )
        )
        self._streams = self._engine.streams()

    def add(self, prompt: list[int], max_tokens: int) -> int:
        """Queues it for the next step."""
        return self._streams.add(prompt, max_tokens)

    def step(self) -> list[tuple[int, list[int]]]:
        """One forward: prompts in pieces beside those that decode, as in a colocated worker."""
        return self._streams.step()

    def cancel(self, number: int) -> None:
        """Ends it, and frees its blocks."""
        self._streams.cancel(number)

    def run(self, prompts: list[list[int]], num_at_once: int, max_tokens: int) -> dict[str, Any]:
        """One run, with the rates of its steps."""
        run = self._engine.run(prompts, num_at_once, max_tokens)
        return {
            "requests": [
                asdict(times) | {"token_ids": ids}
                for times, ids in zip(run.requests, run.token_ids, strict=True)
            ],
            "decode_bytes_per_s": run.decode_bytes_per_s,
            "prefill_ops_per_s": run.prefill_ops_per_s,
        }
