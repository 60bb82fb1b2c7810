"""Entry: one answer's place in the router's queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.deadline import NO_DEADLINE
from legato.cluster.policies import Demand

if TYPE_CHECKING:
    import asyncio

    from legato.cluster.attempt_placement import Placement
    from legato.cluster.control_plane import Role
    from legato.cluster.deadline import Deadline
    from legato.cluster.prompt_hashes import PromptHashes


# Of the time until its deadline, a request is passed by smaller ones for so much at most.
PASSED_OVER_SHARE = 0.25


class Entry:
    """It keeps its place over all its attempts. Answers that are served together wait in the first
    one's place.
    """

    def __init__(
        self,
        arrival: int,
        now: float,
        deadline: Deadline = NO_DEADLINE,
        prompt: PromptHashes | None = None,
    ) -> None:
        """`deadline` is on the same clock as `now`."""
        self.arrival = arrival  # by requests, then by answers
        self.arrived_at = now
        self.deadline = deadline
        self.prompt = prompt  # None: it is not known where its beginning lies
        self.waiting_since = now  # of the present wait
        self.demand = Demand(prefill_tokens=0, decode_tokens=0)
        self.placed: asyncio.Future[Placement] | None = None
        self.has_begun = False  # work on it has begun on a worker: it is never turned away
        self.keeps: Placement | None = None  # only another decode worker is wanted
        self.asking: str | None = None  # the decode worker that has yet to grant its ticket
        self.has_waited = False  # it could not start at once
        self.has_asked = False  # it comes back to the queue, and stands before others there
        self.kept_free: dict[Role, str] = {}  # workers that drain for it, once it is overdue

    def is_overdue(self, now: float, max_passed_over_s: float) -> bool:
        """Whether smaller ones have passed it for long enough."""
        all_s = self.deadline.at - self.arrived_at
        return now - self.arrived_at >= min(max_passed_over_s, PASSED_OVER_SHARE * all_s)

    @property
    def waits(self) -> bool:
        """It is in the queue, and nothing has been decided."""
        return self.placed is not None and not self.placed.done()
