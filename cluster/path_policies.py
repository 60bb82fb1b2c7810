"""What to do where KV does not get from one worker to another: pure rules over frozen snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.policies import NOTHING_KNOWN, pick_decode, pick_prefill

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from legato.cluster.policies import Demand, Knowledge, WorkerSnapshot

    Path = tuple[str, str]  # ids of a prefill and of a decode worker
    Closed = frozenset[Path]  # KV did not get over these of late

# A request whose KV found no way for so long ends, where every path is closed; where others are
# open it may try those for twice as long. The first failure takes up to 5 s by itself.
NO_WAY_S = 5.0
# So many decode workers out of reach are no chance.
CUT_OFF_AT = 2


def has_open_path(prefills: Iterable[str], decodes: Sequence[str], closed: Closed) -> bool:
    """Whether KV may get from any to any."""
    return any((p, d) not in closed for p in prefills for d in decodes)


def is_cut_off(prefill: str, decodes: Sequence[str], closed: Closed) -> bool:
    """Whether the prefill worker itself is the suspect: several decode workers, or all there are,
    are out of its reach.
    """
    num_closed = sum((prefill, decode) in closed for decode in decodes)
    return num_closed >= max(1, min(CUT_OFF_AT, len(decodes)))


def keeps_prefill(
    prefill: str, prefills: Iterable[str], decodes: Sequence[str], closed: Closed
) -> bool:
    """Whether KV that did not get over its path is sent to another decode worker, which costs no
    second prefill; else another prefill worker computes it again.
    """
    others = [p for p in prefills if p != prefill]
    return not (is_cut_off(prefill, decodes, closed) and has_open_path(others, decodes, closed))


def gives_up(seconds: float, *, any_open: bool) -> bool:
    """Whether a request ends, so long after its KV met the first path that failed."""
    return seconds >= (2 * NO_WAY_S if any_open else NO_WAY_S)


def pick_pair(
    demand: Demand,
    prefills: Sequence[WorkerSnapshot],
    decodes: Sequence[WorkerSnapshot],
    closed: Closed,
    known: Knowledge = NOTHING_KNOWN,
) -> tuple[WorkerSnapshot, WorkerSnapshot] | None:
    """As `pick_prefill` and `pick_decode`, over a path that is open; None: none with room now."""
    left = list(prefills)
    while (prefill := pick_prefill(demand, left, known)) is not None:
        decode = pick_reachable(demand, prefill.worker_id, decodes, closed, known)
        if decode is not None:
            return prefill, decode
        left.remove(prefill)
    return None


def pick_reachable(
    demand: Demand,
    prefill: str,
    decodes: Iterable[WorkerSnapshot],
    closed: Closed,
    known: Knowledge = NOTHING_KNOWN,
) -> WorkerSnapshot | None:
    """As `pick_decode`, for KV that is at that prefill worker."""
    reachable = [d for d in decodes if (prefill, d.worker_id) not in closed]
    return pick_decode(demand, reachable, known)
