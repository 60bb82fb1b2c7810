"""Growth: how many KV blocks sequences will hold together, at the worst moment to come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Growth:
    """One sequence: rows of KV now, rows at its expected end."""

    rows: int
    expected_rows: int
    shared_blocks: int = 0  # not given back at its end, and counted by the caller

    @property
    def steps_left(self) -> int:
        """Each step adds one row."""
        return max(0, self.expected_rows - self.rows)


def peak_blocks(growths: Iterable[Growth], block_size: int) -> int:
    """The most blocks that all hold at one time, shared ones left out.

    Each gains one row a step, and gives its blocks back when it has reached its end. Summing up
    the final sizes instead would keep a third of the pool idle: while the last ones grow to their
    end, the first ones are gone. The total only falls when one ends, so it is enough to look at
    these moments. O(n log n + n · block_size): how many have begun a further block by then is
    read from a count of the rows' remainders.
    """
    ordered = sorted(growths, key=lambda g: -g.steps_left)
    remainders = [0] * block_size  # of those that still grow at the moment looked at
    whole_blocks = peak = 0
    for place, growth in enumerate(ordered):
        quotient, remainder = divmod(growth.rows + block_size - 1, block_size)
        whole_blocks += quotient - growth.shared_blocks
        remainders[remainder] += 1
        steps = growth.steps_left
        if place + 1 < len(ordered) and ordered[place + 1].steps_left == steps:
            continue
        blocks, rows = divmod(steps, block_size)
        begun = sum(remainders[block_size - rows :]) if rows else 0
        peak = max(peak, whole_blocks + (place + 1) * blocks + begun)
    return peak
