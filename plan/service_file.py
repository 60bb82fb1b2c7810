"""service_file: the plan as a legato.yaml, which `legato serve --config` takes as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.plan.answer import Answer


@dataclass(frozen=True)
class PlannedWorker:
    """What the plan assumes of every worker."""

    model: str
    device: str
    dtype: str
    weights: str
    kv_cache: str
    kv_memory_bytes: int
    num_threads: int | None


def service_file(answer: Answer, worker: PlannedWorker, summary: str) -> str:
    """The text; `summary` becomes a comment."""
    settings: dict[str, object] = {
        "model": _quoted(worker.model),
        "prefill": answer.prefill_workers,
        "decode": answer.decode_workers,
        "device": worker.device,
        "dtype": worker.dtype,
        "weights": worker.weights,
        "kv_cache": worker.kv_cache,
        "kv_memory": worker.kv_memory_bytes,
        "max_batch_size": answer.max_batch_size,
    }
    if worker.num_threads is not None:
        settings["threads"] = worker.num_threads
    comment = "".join(f"# {line}\n" for line in summary.splitlines())
    return comment + "".join(f"{name}: {value}\n" for name, value in settings.items())


def _quoted(text: str) -> str:
    """As YAML's single quotes have it: a path may hold what YAML takes for its own."""
    return "'" + text.replace("'", "''") + "'"
