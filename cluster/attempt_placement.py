"""Placement: the workers of one attempt, with the attempt's share of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.cluster.policies import Demand
    from legato.cluster.worker_view import DecodeShare, PrefillShare, WorkerView


@dataclass(frozen=True)
class Placement:
    """Given out by the queue; whoever has it releases it. A colocated worker is both."""

    demand: Demand  # as it stood then: a batch request that had waited long is none any more
    prefill: WorkerView
    prefill_share: PrefillShare
    decode: WorkerView | None
    decode_share: DecodeShare | None
    settle: Callable[..., None]  # the decode worker is asked no more; `granted`: it said yes
    wake: Callable[[], None]

    @property
    def is_colocated(self) -> bool:
        """Whether one worker computes the prompt and decodes."""
        return self.prefill is self.decode

    def granted(self) -> None:
        """The decode worker gave a ticket."""
        if self.decode_share is not None:
            self.decode_share.granted()
        self.settle(granted=True)

    def computed(self) -> None:
        """Prefill gave the first token: the next prompt may go there."""
        self.prefill_share.computed()
        self.wake()

    def handed_over(self) -> None:
        """The KV is with the decode worker: prefill's blocks are free."""
        self.prefill_share.release()
        self.wake()

    def give_up_decode(self) -> None:
        """The decode worker is lost to the attempt, or took it not; prefill goes on. Idempotent."""
        self.settle(granted=False)
        if self.decode_share is not None:
            self.decode_share.release()
        self.wake()

    def release(self) -> None:
        """Gives back what is still held of both workers. Idempotent."""
        self.prefill_share.release()
        self.give_up_decode()
