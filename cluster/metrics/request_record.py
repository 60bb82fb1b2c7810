"""RequestRecord, AnswerRecord: what is counted, and traced, of one request on its way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from legato.cluster.errors import RequestError
from legato.cluster.metrics.outcome import outcome_of
from legato.cluster.timings import Phase
from legato.protos import common_pb2

if TYPE_CHECKING:
    from types import TracebackType

    from legato.cluster.attempt_errors import AttemptEndedError
    from legato.cluster.metrics.meters import Meters
    from legato.cluster.metrics.request_trace import RequestTrace
    from legato.protos import generation_pb2

_FINISH_REASONS = {
    number: name.removeprefix("FINISH_REASON_").lower()
    for name, number in common_pb2.FinishReason.items()
}
_ENDED = {
    "NoRoomError": "no_room",
    "RefusedError": "refused",
    "KvGoneError": "kv_gone",
    "KvLapsedError": "kv_lapsed",
    "PathFailedError": "path_failed",
    "WorkerFailedError": "worker_failed",
}


class RequestRecord:
    """Use as a context around all that is done for the request."""

    def __init__(
        self,
        meters: Meters,
        request: generation_pb2.GenerateRequest,
        service: tuple[str, ...],
        trace: RequestTrace | None = None,
    ) -> None:
        """`service`: values of the conventions' labels behind the operation's name."""
        is_batch = request.priority == common_pb2.PRIORITY_BATCH
        self.meters = meters
        self.trace = trace
        self.priority = "batch" if is_batch else "interactive"
        self.gen_ai = (operation_of(request), *service)
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        meters, spent_s = self.meters, time.monotonic() - self._began_s
        outcome = outcome_of(error)
        meters.requests.add(1, (outcome, self.priority))
        meters.duration.of(outcome, self.priority).add(spent_s)
        error_type = ""
        if outcome in ("refused", "failed"):
            error_type = reason = _reason(error)
            if outcome == "refused":
                meters.refusals.add(1, (reason,))
            else:
                meters.failures.add(1, (reason,))
        elif outcome == "cancelled":
            error_type = "cancelled"
        meters.gen_ai_duration.of(*self.gen_ai, error_type).add(spent_s)
        if self.trace is not None:
            self.trace.end(outcome, error_type)

    def answer(self, index: int) -> AnswerRecord:
        """Of one of its answers, which waits in the queue."""
        return AnswerRecord(self, index)

    def attempt_ended(self, error: AttemptEndedError) -> None:
        """Early; the request goes on, or is given up."""
        reason = _ENDED[type(error).__name__]
        self.meters.attempts_ended.add(1, (reason,))
        if self.trace is not None:
            self.trace.note("attempt ended", reason=reason, worker=error.view.worker_id)


class AnswerRecord:
    """Of one answer; what is called for each message of tokens is kept cheap."""

    def __init__(self, request: RequestRecord, index: int) -> None:
        self._request = request
        self._meters = request.meters
        self._index = index
        self._trace = request.trace
        self._ttft = request.meters.ttft.of(request.priority)
        self._gaps = request.meters.itl.of(request.priority)
        self._first_s = self._last_s = 0.0  # messages, on the monotonic clock
        self._num_tokens = 0  # of this call
        if self._trace is not None:
            self._trace.begin_answer(index)

    def entered(self, phase: Phase) -> None:
        """The phase before is over."""
        if self._trace is not None:
            self._trace.enter(self._index, phase)

    def computed(self, num_prompt_tokens: int, num_cached: int) -> None:
        """The prompt's KV is there; a replay does not count."""
        if not self._num_tokens:
            self._meters.prompt_tokens.add(num_prompt_tokens)
            self._meters.cached_tokens.add(num_cached)

    def delivers(self, num_tokens: int, ttft_s: float | None) -> None:
        """A message is being handed to gRPC; `ttft_s`: it is the first."""
        now_s = time.monotonic()
        if ttft_s is not None:
            self._first_s = now_s
            self._ttft.add(ttft_s)
            self._meters.gen_ai_ttft.of(*self._request.gen_ai).add(ttft_s)
        elif num_tokens:
            self._gaps.add((now_s - self._last_s) / num_tokens, num_tokens)
        self._last_s = now_s
        self._num_tokens += num_tokens
        self._meters.generated_tokens.values[()] += num_tokens

    def begins(self, num_replayed: int) -> None:
        """An attempt begins with so many tokens of earlier ones."""
        if num_replayed:
            self._meters.replays.add()
            self._meters.replayed_tokens.add(num_replayed)
            self._note("replayed", tokens=num_replayed)

    def retargeted(self, worker_id: str) -> None:
        """Its KV goes to another decode worker."""
        self._meters.retargets.add()
        self._note("retargeted", worker=worker_id)

    def moved(self, worker_id: str) -> None:
        """With its KV, while it ran."""
        self._meters.moves.add()
        self._note("moved", worker=worker_id)

    def preempted(self) -> None:
        """It was sent away for want of KV blocks."""
        self._meters.preemptions.add()
        self._note("preempted")

    def ended(self, finish: generation_pb2.Finish) -> None:
        """By itself: its last message is about to go out."""
        meters, timings = self._meters, finish.timings
        reason = _FINISH_REASONS[finish.finish_reason]
        meters.answers.add(1, (reason,))
        for phase in Phase:
            meters.phases.of(phase.value.removesuffix("_s")).add(getattr(timings, phase.value))
        meters.prefill_wait.of().add(timings.prefill_wait_s)
        meters.prefill_model.of().add(timings.prefill_model_s)
        if timings.kv_bytes_handed_over:
            meters.handoffs.add()
            meters.handoff_bytes.add(timings.kv_bytes_handed_over)
            meters.handoff_reused.add(timings.handoff_reused_tokens)
            meters.kv_transfer.of().add(timings.kv_transfer_s)
        if self._num_tokens > 1:
            token_s = (self._last_s - self._first_s) / (self._num_tokens - 1)
            meters.tpot.of(self._request.priority).add(token_s)
            meters.gen_ai_tpot.of(*self._request.gen_ai).add(token_s)
        if self._trace is not None:
            self._trace.end_answer(self._index, finish, reason)

    def _note(self, event: str, **fields: str | int) -> None:
        if self._trace is not None:
            self._trace.note(event, answer=self._index, **fields)


def operation_of(request: generation_pb2.GenerateRequest) -> str:
    """As the conventions name it."""
    return "chat" if request.HasField("messages") else "text_completion"


def _reason(error: BaseException | None) -> str:
    """A name of `error_reasons.Reason`, for a label."""
    return error.reason.name.lower() if isinstance(error, RequestError) else "internal_fault"
