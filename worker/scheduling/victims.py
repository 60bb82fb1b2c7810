"""Victims: who yields its KV blocks where there are too few."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.scheduling.live import claim_of, rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as SequenceOf

    from legato.worker.priority import Priority
    from legato.worker.sequence import Sequence


def choose_victim(
    here: Iterable[Sequence], is_protected: Callable[[Sequence], bool]
) -> Sequence | None:
    """Who yields so that the others can go on; None where nobody may.

    Of those not protected the last in rank; of the protected, where there are no others. The first
    in rank never yields. One whose last token is on its way gives its blocks back by itself.
    """
    candidates = [sequence for sequence in here if not sequence.ends_unread]
    if len(candidates) < 2:
        return None
    candidates.remove(min(candidates, key=rank))
    return max(candidates, key=lambda s: (not is_protected(s), rank(s)))


def choose_lower(
    last_first: SequenceOf[Sequence],
    priority: Priority,
    num_blocks: int,
    is_protected: Callable[[Sequence], bool],
) -> list[Sequence]:
    """Who yields to one of `priority` that wants `num_blocks` more; they may not be enough."""
    victims: list[Sequence] = []
    for sequence in last_first:
        if num_blocks <= 0 or claim_of(sequence).priority >= priority:
            break
        if not is_protected(sequence) and not sequence.ends_unread:
            victims.append(sequence)
            num_blocks -= claim_of(sequence).own_blocks
    return victims
