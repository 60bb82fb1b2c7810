"""AdmitGate: what is measured for `admit`, and the errors that its refusals become."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from legato.cluster.admit_policy import (
    Applicant,
    Pace,
    QueueLimits,
    QueueSnapshot,
    Work,
)
from legato.cluster.error_reasons import Reason
from legato.cluster.errors import RequestError
from legato.cluster.flow_meter import FlowMeter
from legato.cluster.service_times import ServiceTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from legato.cluster.admit_policy import Refusal
    from legato.cluster.config import RouterOptions
    from legato.cluster.deadline import Deadline
    from legato.cluster.policies import Demand
    from legato.cluster.pool_view import PoolView
    from legato.cluster.queue_entry import Entry


class AdmitGate:
    """Of one router's queue. `now` is a monotonic clock in seconds."""

    def __init__(self, options: RouterOptions, pool: PoolView, now: Callable[[], float]) -> None:
        self.limits = QueueLimits(options.max_queued_requests, options.max_queued_tokens)
        self.times = ServiceTimes(now)
        self._pool = pool
        self._now = now
        self._drain = FlowMeter(now)
        self._offered = FlowMeter(now)
        self._offered.set_waited(True)  # all time counts, not only that in which somebody waits

    def pace(self) -> Pace:
        """As measured by now. Without workers nothing is known of when they will be there."""
        if not self._has_workers():
            return Pace()
        return Pace(
            drain_tokens_s=self._drain.tokens_s(),
            offered_tokens_s=self._offered.tokens_s() or 0.0,
            batch_tokens_s=self._drain.batch_tokens_s() or 0.0,
            start_s=self.times.start_s,
            output_token_s=self.times.output_token_s,
        )

    def note_queue(self, *, waits: bool) -> None:
        """Whether somebody waits, after everyone who could has started; for workers that are there,
        or that time would count as theirs.
        """
        self._drain.set_waited(waits and self._has_workers())

    def _has_workers(self) -> bool:
        return all(self._pool.placeable(role) for role in self._pool.needed_roles())

    def note_arrival(self, demand: Demand) -> None:
        """A request has come, to be let in or not."""
        if not demand.batch:
            self._offered.note(self.work(demand).tokens)

    def note_start(self, demand: Demand) -> None:
        """A request has left the queue for good: it has its ticket, or needs none."""
        self._drain.note(self.work(demand).tokens, batch=demand.batch)

    def work(self, demand: Demand) -> Work:
        """What a demand is in the queue's measure."""
        each = self.expected_output(demand)
        return Work(1, demand.prefill_tokens, each * demand.num_answers)

    def snapshot(self, entries: Iterable[Entry]) -> QueueSnapshot:
        """Of those entries that wait."""
        sums = {True: Work(), False: Work()}
        for entry in entries:
            sums[entry.demand.batch] += self.work(entry.demand)
        return QueueSnapshot(sums[False], sums[True])

    def applicant(self, entry: Entry) -> Applicant:
        """An entry as the policy sees it."""
        return self.newcomer(entry.demand, entry.deadline)

    def newcomer(self, demand: Demand, deadline: Deadline) -> Applicant:
        """A request that is no entry yet."""
        longest, left_s = self.expected_output(demand), deadline.at - self._now()
        return Applicant(self.work(demand), longest, demand.batch, left_s, deadline.name)

    def expected_output(self, demand: Demand) -> int:
        """Tokens of each answer."""
        most = max(1, demand.decode_tokens - demand.prefill_tokens + 1)
        return self.times.expected_output(most)


def refused(refusal: Refusal) -> RequestError:
    """RESOURCE_EXHAUSTED with the reason, and the hint where waiting helps."""
    if refusal.retry_s is None:
        reason = Reason.DEADLINE_TOO_SHORT
        return RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal.reason, reason=reason)
    return RequestError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"{refusal.reason}; try again in {refusal.retry_s:.1f} s",
        retry_after_ms=int(refusal.retry_s * 1000),
        reason=Reason.TOO_LATE if refusal.too_late else Reason.OVERLOADED,
    )
