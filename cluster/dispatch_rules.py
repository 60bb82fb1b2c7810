"""What dispatch asks of queue and workers beside the policies: who is in whose way, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.colocation import one_answer
from legato.cluster.path_policies import has_open_path, pick_pair, pick_reachable
from legato.cluster.policies import Demand

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from legato.cluster.path_policies import Closed
    from legato.cluster.policies import Knowledge, WorkerSnapshot
    from legato.cluster.queue_entry import Entry

_NO_PATHS: Closed = frozenset()


def over_open_path(
    entry: Entry,
    prefills: Iterable[WorkerSnapshot],
    decodes: Iterable[WorkerSnapshot],
    everyone: tuple[Sequence[WorkerSnapshot], Sequence[WorkerSnapshot]],
    closed: Closed,
    known: Knowledge,
) -> tuple[WorkerSnapshot | None, WorkerSnapshot] | None:
    """Workers that have room now, a prefill worker only where none is kept; None: to be waited for.

    A path that failed of late is taken where each one has, among all workers that are large enough.
    """
    demand = entry.demand
    all_prefills, all_decodes = (
        [w.worker_id for w in workers if w.can_ever_hold(demand)] for workers in everyone
    )
    if entry.keeps is None:
        is_choice = has_open_path(all_prefills, all_decodes, closed)
        return pick_pair(
            demand, tuple(prefills), tuple(decodes), closed if is_choice else _NO_PATHS, known
        )
    kept = entry.keeps.prefill.worker_id
    is_choice = has_open_path((kept,), all_decodes, closed)
    decode = pick_reachable(demand, kept, decodes, closed if is_choice else _NO_PATHS, known)
    return None if decode is None else (None, decode)


def smaller(blocked: Demand | None, demand: Demand) -> Demand:
    """The least of both needs: who asks for less than this asks for less than each blocked one."""
    if blocked is None:
        return demand
    return Demand(
        prefill_tokens=min(blocked.prefill_tokens, demand.prefill_tokens),
        decode_tokens=min(blocked.all_decode_tokens, demand.all_decode_tokens),
    )


def close_kept(
    entry: Entry, decodes: dict[str, WorkerSnapshot], alone: dict[str, WorkerSnapshot]
) -> None:
    """Of an overdue request that asks for a ticket: it may be refused, and must find no less room
    than there is now.
    """
    kept = entry.kept_free
    for worker_id in (entry.asking, kept.get("decode"), kept.get("colocated")):
        if worker_id is not None:
            decodes.pop(worker_id, None)
            alone.pop(worker_id, None)


def can_ever_hold(workers: Iterable[WorkerSnapshot], demand: Demand) -> bool:
    """Whether one of them is large enough."""
    return any(
        w.can_ever_hold(one_answer(demand) if w.role == "colocated" else demand) for w in workers
    )


def hopeless(demand: Demand, workers: Sequence[WorkerSnapshot]) -> str:
    """Why none of these workers can ever hold it, in a sentence."""
    largest = max(workers, key=lambda w: w.total_blocks * w.block_size)
    need = demand.decode_tokens
    if largest.role == "prefill" or not demand.decode_tokens:
        need = demand.prefill_tokens
    each = ""
    if largest.role == "decode" and demand.num_answers > 1:
        each = f" for each of its {demand.num_answers} answers"
    return (
        f"no {largest.role} worker can hold this request: it needs {need} KV tokens{each}, "
        f"the largest {largest.role} worker now holds {largest.total_blocks * largest.block_size}"
    )
