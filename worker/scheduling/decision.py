"""Decision: a decode step, and the KV blocks to be moved before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legato.worker.scheduling.step import Step

if TYPE_CHECKING:
    from legato.worker.scheduling.step import StepPart
    from legato.worker.sequence import Sequence


@dataclass(frozen=True)
class BlockCopy:
    """One block's rows, within the pool: the tail of a fork's prompt."""

    source: int
    target: int


@dataclass(frozen=True)
class SwapOut:
    """blocks[i] of the pool goes to slots[i] of the host's memory."""

    sequence: Sequence
    blocks: list[int]
    slots: list[int]


@dataclass(frozen=True)
class SwapIn:
    """slots[i] of the host's memory goes to blocks[i] of the pool."""

    sequence: Sequence
    slots: list[int]
    blocks: list[int]


@dataclass(frozen=True)
class Decision(Step):
    """The copies run in the order of the fields, then the step; there may be no part in it.

    A swap-out's blocks may be the target of a swap-in here, and the step may write to them. The
    blocks that nobody here needs stay held until the device is done (`CapacityScheduler.settle`),
    so that no other thread gets one whose contents are still to be read.
    """

    copies: list[BlockCopy] = field(default_factory=list)
    swap_outs: list[SwapOut] = field(default_factory=list)
    swap_ins: list[SwapIn] = field(default_factory=list)
    # These end their stay here: their tokens go on on another worker, computed anew.
    returned: list[Sequence] = field(default_factory=list)
    # References to give up when settled; one list for each sequence, in its order.
    free_after: list[list[int]] = field(default_factory=list)
    # Of the parts, those that compute rows of a prompt.
    prompt_parts: list[StepPart] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """New tokens of prompts."""
        return sum(part.num_tokens for part in self.prompt_parts)
