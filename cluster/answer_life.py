"""AnswerLife: what one of a request's answers carries through its attempts, up to its finish."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legato.cluster.answer import Ending
from legato.cluster.attempt_errors import WorkerFaultError
from legato.cluster.blame import was_well
from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from legato.cluster.answer import Answer
    from legato.cluster.attempt_errors import PathFailedError
    from legato.cluster.load_window import LoadWindow
    from legato.cluster.queue_entry import Entry
    from legato.cluster.request import RequestSpec
    from legato.cluster.request_log import RequestLog
    from legato.cluster.timings import Phase, PhaseClock
    from legato.cluster.worker_view import WorkerView
    from legato.protos import worker_pb2

    Send = Callable[[generation_pb2.GenerateResponse], Awaitable[None]]


@dataclass(eq=False)
class AnswerLife:
    """Tokens, times and counts so far; knows how to tell them to the client."""

    spec: RequestSpec
    index: int  # which of the n answers
    answer: Answer
    entry: Entry
    clock: PhaseClock
    send: Send  # hands a message to gRPC; returns when the client's flow control took it
    token_text: Callable[[int], str]
    log: RequestLog
    window: LoadWindow | None = None  # where its waits are counted, if anywhere
    timings: generation_pb2.Timings = field(default_factory=generation_pb2.Timings)
    avoid: frozenset[str] = frozenset()  # workers that failed it
    failures: int = 0
    strikes: int = 0  # failures that may be the request's own doing, since it was last well
    failed_paths: tuple[PathFailedError, ...] = ()  # its KV did not get over these
    no_way_since_s: float | None = None  # when the first of them failed, on the monotonic clock
    refusals: int = 0
    num_preemptions: int = 0  # swapped or sent away for want of KV blocks
    cached_prompt_tokens: int = 0  # as Usage has it
    num_replayed: int = 0  # of the tokens so far, those that the present attempt begins with

    @property
    def token_ids(self) -> list[int]:
        """Prompt and emitted tokens that the attempt begins with."""
        return [*self.spec.prompt_token_ids, *self.answer.token_ids[: self.num_replayed]]

    @property
    def num_to_come(self) -> int:
        """Tokens that the attempt may generate, those that come again included."""
        return self.spec.max_tokens - self.num_replayed

    def enter(self, phase: Phase) -> None:
        """The running phase ends, and `phase` begins."""
        self.clock.enter(phase)
        self.note("phase", phase=phase.name.lower(), tokens=len(self.answer.token_ids))

    def note(self, event: str, **fields: str | int | None) -> None:
        """In the request log."""
        self.log.note(event, request=self.spec.request_id, answer=self.index, **fields)

    def note_begun(self, attempt: int, prefill: str | None, decode: str | None) -> None:
        """These workers have it, in the attempt of this number. `prefill` None: its KV moved."""
        self.note("begun", attempt=attempt, prefill=prefill, decode=decode)

    def note_left(self, attempt: int) -> None:
        """The workers of that attempt have nothing of it any more."""
        self.note("left", attempt=attempt, tokens=len(self.answer.token_ids))

    def begin(self, prefill_kv_tokens: int) -> None:
        """An attempt begins: with all tokens so far, or as many as prefill has room for.

        The others come again in decode, the same ones, for a token depends on the seed and its
        position alone.
        """
        room = max(0, prefill_kv_tokens - len(self.spec.prompt_token_ids))
        self.num_replayed = min(len(self.answer.token_ids), room)
        self.answer.begin(self.num_replayed)

    def begin_moved(self) -> None:
        """The attempt goes on at another worker, which has the KV of all tokens but the last."""
        self.num_replayed = self.answer.num_taken

    def take(
        self,
        tokens: Sequence[worker_pb2.SampledToken],
        reason: common_pb2.FinishReason.ValueType | None,
    ) -> tuple[generation_pb2.Delta, Ending | None]:
        """The delta that the next tokens make, and the ending where they are the last.

        `reason`: why they are, by the worker's word; None where it has more. A stop string outranks
        it; a stop token is named as text. Where the prompt is all that is wanted, nothing is new.
        """
        if self.spec.prompt_only:
            return generation_pb2.Delta(), Ending(common_pb2.FINISH_REASON_LENGTH)
        delta = self.answer.take(tokens, finished=reason is not None)
        if self.answer.stopped_by is not None:
            return delta, Ending(common_pb2.FINISH_REASON_STOP, self.answer.stopped_by)
        if reason is None:
            return delta, None
        if reason == common_pb2.FINISH_REASON_UNSPECIFIED:
            raise WorkerFaultError("a worker finished the answer without saying why")
        if reason == common_pb2.FINISH_REASON_STOP and self.answer.token_ids:
            return delta, Ending(reason, self.token_text(self.answer.token_ids[-1]))
        return delta, Ending(reason)

    def was_out_of_reach(self, lost: WorkerView) -> bool:
        """Whether its KV did not get to that worker before; now it is known why."""
        others = tuple(error for error in self.failed_paths if error.view is not lost)
        was = len(others) < len(self.failed_paths)
        self.failed_paths = others
        if not others:
            self.no_way_since_s = None
        return was

    @property
    def was_well(self) -> bool:
        """Whether the attempt that is ending had decoded for a while."""
        num_new_tokens = len(self.answer.token_ids) - self.num_replayed
        return was_well(self.clock.phase, self.clock.in_phase_s, num_new_tokens)

    async def deliver(self, delta: generation_pb2.Delta) -> None:
        """One message with what is new, unless nothing is."""
        if delta.token_ids or delta.text:
            ttft_s = self.clock.mark_first_token()
            if ttft_s is not None and self.window is not None:
                self.window.note_first_token(ttft_s)
            await self._tell(generation_pb2.GenerateResponse(delta=delta))

    async def finish(self, ending: Ending) -> None:
        """The last message: why it ended, what it used, where the time went."""
        self.timings.attempts = 1 + self.failures
        self.timings.preemptions = self.num_preemptions
        self.clock.write_to(self.timings)
        finish = generation_pb2.Finish(
            finish_reason=ending.finish_reason,
            usage=generation_pb2.Usage(
                prompt_tokens=len(self.spec.prompt_token_ids),
                completion_tokens=len(self.answer.token_ids),
                seed=self.spec.seed_of(self.index),
                cached_prompt_tokens=self.cached_prompt_tokens,
            ),
            timings=self.timings,
            stop_reason=ending.stop_reason,
        )
        await self._tell(generation_pb2.GenerateResponse(finish=finish))

    def count_prefill(self, first: worker_pb2.FirstToken, worker_id: str) -> None:
        """To be called before the first token is taken. What answers share, each of them counts."""
        self.timings.prefill_worker = worker_id
        self.timings.prefill_forwards += first.prefill_forwards
        self.timings.prefill_wait_s += first.wait_s
        self.timings.prefill_model_s += first.model_s
        self.timings.kv_tokens_written += len(self.token_ids) - first.cached_tokens
        self.cached_prompt_tokens = min(first.cached_tokens, len(self.spec.prompt_token_ids))

    def count_handoff(self, done: worker_pb2.HandoffDone) -> None:
        """The KV has arrived."""
        self.timings.kv_bytes_handed_over += done.kv_bytes
        self.timings.kv_transfer_s += done.transfer_s
        self.timings.handoff_reused_tokens += done.reused_tokens

    def count_move(self, moved: worker_pb2.Moved) -> None:
        """The KV is with another decode worker."""
        self.timings.moves += 1
        self.timings.kv_bytes_handed_over += moved.kv_bytes
        self.timings.kv_transfer_s += moved.transfer_s
        self.timings.handoff_reused_tokens += moved.reused_tokens

    async def _tell(self, response: generation_pb2.GenerateResponse) -> None:
        response.index = self.index
        response.request_id = self.spec.request_id
        await self.send(response)


Group = dict[int, AnswerLife]  # served together, by their number in the calls to the workers


class DecodeFigures:
    """Adds to an answer's figures what a decode worker counts from the attempt's start."""

    def __init__(self, life: AnswerLife, worker_id: str) -> None:
        self._life = life
        self._before = generation_pb2.Timings()
        self._before.CopyFrom(life.timings)
        self._preemptions_before = life.num_preemptions
        life.timings.decode_worker = worker_id

    def count(self, tokens: worker_pb2.Tokens) -> None:
        """The latest count replaces the one before."""
        timings, before = self._life.timings, self._before
        timings.decode_forwards = before.decode_forwards + tokens.decode_forwards
        timings.kv_tokens_written = before.kv_tokens_written + tokens.decode_forwards
        timings.decode_model_s = before.decode_model_s + tokens.model_s
        self._life.num_preemptions = self._preemptions_before + tokens.swaps


def enter(answers: Iterable[AnswerLife], phase: Phase) -> None:
    """For answers that are served together."""
    for answer in answers:
        answer.enter(phase)
