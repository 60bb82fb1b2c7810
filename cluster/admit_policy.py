"""admit: whether a request may wait in the queue, by what waits before it and what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.cluster.policies import BATCH_AGEING_S
from legato.cluster.spoken_time import spoken_time

if TYPE_CHECKING:
    from collections.abc import Sequence

# An estimate rests on means. Where others wait, one that arrives is let in where there is time for
# twice as much, so that hardly any is let in and then too late: that would be told late, and
# may have cost work. Where nobody waits, nothing is gained by refusing it. One that waits is given
# up only where there is no time for half of its wait: it has waited already, and others before it
# may leave. What batch requests wait depends on who comes after them: they need more.
ARRIVAL_MARGIN, BATCH_MARGIN = 2.0, 4.0
QUEUED_WAIT_SHARE = 0.5
# Of the drain, what batch requests that have aged are taken to get: they stand before interactive
# ones then, and are not to be let in by so many that these get nothing.
AGED_SHARE = 0.25
MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0


@dataclass(frozen=True)
class Work:
    """What requests ask for, in tokens; `output_tokens` as far as is expected."""

    requests: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0  # of all answers

    @property
    def tokens(self) -> int:
        """The queue's measure."""
        return self.prefill_tokens + self.output_tokens

    def __add__(self, other: Work) -> Work:
        return Work(
            self.requests + other.requests,
            self.prefill_tokens + other.prefill_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True)
class Applicant:
    """A request that wants to wait, or waits."""

    work: Work
    longest_output: int  # expected tokens of one of its answers: they are generated together
    batch: bool
    left_s: float  # until its deadline
    deadline: str = "its deadline"  # in words


@dataclass(frozen=True)
class QueueSnapshot:
    """What waits, by priority; a batch request that has waited long counts as interactive."""

    interactive: Work = Work()
    batch: Work = Work()

    def ahead_of(self, *, batch: bool) -> Work:
        """What starts before one that arrives now."""
        return self.interactive + self.batch if batch else self.interactive


@dataclass(frozen=True)
class QueueLimits:
    """Of all that wait."""

    requests: int
    tokens: int


@dataclass(frozen=True)
class Pace:
    """What was measured of late; None: nothing of that kind."""

    # Tokens (prompt and expected output) a second of those that start while somebody waits.
    drain_tokens_s: float | None = None
    offered_tokens_s: float = 0.0  # of interactive requests that arrive, let in or not
    batch_tokens_s: float = 0.0  # of batch requests, while others have to wait
    start_s: float | None = None  # from the queue's end to the first token
    output_token_s: float | None = None  # between two tokens of one answer


@dataclass(frozen=True)
class Refusal:
    """Why not, in words that follow "the queue is full: " and the like; and when to try again."""

    reason: str
    retry_s: float | None  # None: waiting does not help
    too_late: bool = False  # for its deadline; else too many wait


def admit(own: Applicant, queue: QueueSnapshot, limits: QueueLimits, pace: Pace) -> Refusal | None:
    """None where the request may wait; else why it may not.

    Two rules. The queue is bounded in requests and in tokens; a request of any size may wait where
    no other does, and an interactive one is measured against interactive ones only (batch requests
    give way to it: `pick_to_displace`). And a request whose deadline cannot be met, with a margin
    for the estimate's error, is refused now and not when its time is up: without a hint where
    nobody has had to wait of late, for then it is the deadline that is wrong. What has not been
    measured refuses nobody.
    """
    ahead = queue.ahead_of(batch=own.batch)
    refusal = check_bounds(own, ahead, limits, pace)
    if refusal is not None:
        return refusal
    if (refusal := too_short(own, ahead, pace)) is not None:
        return refusal
    margin = 1.0
    if ahead.requests:
        margin = BATCH_MARGIN if own.batch else ARRIVAL_MARGIN
    return _check_deadline(own, estimate_wait_s(own, ahead, pace), margin, margin, pace)


def too_short(own: Applicant, ahead: Work, pace: Pace) -> Refusal | None:
    """Of `admit`, where it is the deadline that is wrong: also one that may start at once is not
    to be begun.
    """
    service_s = estimate_service_s(own, pace)
    # Where others wait, or did of late, the pace is a full service's: later there may be time.
    is_full = bool(ahead.requests) or pace.drain_tokens_s is not None
    if not is_full and service_s > own.left_s:
        return Refusal(
            f"{own.deadline} is too short for what is asked: {spoken_time(own.left_s)} are given, "
            f"and about {spoken_time(service_s)} are needed, with nobody waiting before it",
            None,
            too_late=True,
        )
    return None


def check_bounds(own: Applicant, ahead: Work, limits: QueueLimits, pace: Pace) -> Refusal | None:
    """The first rule of `admit`."""
    total = ahead + own.work
    over = 0
    if ahead.requests >= limits.requests:
        reason = f"the queue is full: {ahead.requests} requests wait (limit {limits.requests})"
        over = ahead.tokens // max(1, ahead.requests)
    elif ahead.requests and total.tokens > limits.tokens:
        reason = (
            f"the queue is full: {total.prefill_tokens} prompt tokens and {total.output_tokens} "
            f"expected ones would wait (limit {limits.tokens})"
        )
        over = total.tokens - limits.tokens
    else:
        return None
    # A tenth of the queue, so that not all who were told come back for one place.
    over = max(over, ahead.tokens // 10)
    return Refusal(reason, _retry_s(over / pace.drain_tokens_s if pace.drain_tokens_s else 0.0))


def give_up(own: Applicant, ahead: Work, pace: Pace) -> Refusal | None:
    """Whether a request that waits, behind `ahead`, is to be refused now: its deadline has become
    impossible. Nothing it asked of a worker is lost, for it has begun nowhere.
    """
    return _check_deadline(own, estimate_wait_s(own, ahead, pace), QUEUED_WAIT_SHARE, 1.0, pace)


def estimate_wait_s(own: Applicant, ahead: Work, pace: Pace) -> float:
    """Seconds in the queue: what waits before it, at the rate at which it was seen to start. That
    rate is limited by whatever limits the service: prefill, KV or the batch.

    A batch request has only what interactive ones leave of it, for those that arrive later go
    before it: what they do not use, or what batch requests were seen to get; until it has aged. As
    far as they take places of its own size, it waits for that also with nobody before it.
    """
    drain = pace.drain_tokens_s
    if not drain:
        return 0.0
    if not own.batch:
        return ahead.tokens / drain
    tokens, own_s = ahead.tokens + own.work.tokens, own.work.tokens / drain
    left = max(drain - pace.offered_tokens_s, pace.batch_tokens_s)
    aged_s = BATCH_AGEING_S + tokens / (AGED_SHARE * drain)
    return (min(tokens / left, aged_s) if left > 0.0 else aged_s) - own_s


def estimate_service_s(own: Applicant, pace: Pace) -> float:
    """Seconds from the queue's end to the last token; what was not measured counts nothing."""
    return (pace.start_s or 0.0) + max(0, own.longest_output - 1) * (pace.output_token_s or 0.0)


def pick_to_displace(
    own: Applicant, queue: QueueSnapshot, batch: Sequence[Work], limits: QueueLimits
) -> int:
    """How many of the batch requests, oldest first, are to go so that an interactive one may wait:
    so many of the last.
    """
    total, num = queue.interactive + queue.batch, 0
    for work in reversed(batch):
        fits = total.requests < limits.requests and (
            not total.requests or total.tokens + own.work.tokens <= limits.tokens
        )
        if fits:
            break
        total = total + Work(-work.requests, -work.prefill_tokens, -work.output_tokens)
        num += 1
    return num


def _check_deadline(
    own: Applicant, wait_s: float, wait_margin: float, service_margin: float, pace: Pace
) -> Refusal | None:
    service_s = estimate_service_s(own, pace)
    over_s = wait_s * wait_margin + service_s * service_margin - own.left_s
    if over_s <= 0.0:
        return None
    return Refusal(
        f"{own.deadline} cannot be met: {spoken_time(own.left_s)} are left, and about "
        f"{spoken_time(wait_s + service_s)} are needed, {spoken_time(wait_s)} of them in the queue",
        _retry_s(over_s),
        too_late=True,
    )


def _retry_s(seconds: float) -> float:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))
