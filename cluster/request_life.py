"""One request's life: queue, ticket, prefill, hand-off, decode; again where a worker is lost."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from legato.cluster.answer import Answer, Ending
from legato.cluster.errors import unavailable
from legato.cluster.policies import Demand
from legato.cluster.timings import Phase, PhaseClock
from legato.cluster.worker_calls import (
    AttemptEndedError,
    DecodeCall,
    NoRoomError,
    PrefillCall,
    RefusedError,
    WorkerFailedError,
    WorkerFaultError,
)
from legato.protos import common_pb2, generation_pb2, worker_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from legato.cluster.admission import Admission, Placement
    from legato.cluster.pool_view import PoolView
    from legato.cluster.request import RequestSpec

    Send = Callable[[generation_pb2.GenerateResponse], Awaitable[None]]

# The hand-off's figures are sent right after the commit that lets decode begin.
HANDOFF_FIGURES_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


@dataclass
class Life:
    """What one request carries through its attempts."""

    spec: RequestSpec
    answer: Answer
    clock: PhaseClock
    timings: generation_pb2.Timings
    send: Send  # hands a message to gRPC; returns when the client's flow control took it
    seconds_left: Callable[[], float]
    token_text: Callable[[int], str]
    tries: int = 0  # numbers each try for the workers, refused ones included
    moves: int = 0
    refusals: int = 0
    cached_prompt_tokens: int = 0  # as Usage has it

    def demand(self, avoid: frozenset[str]) -> Demand:
        """What the next attempt needs. With one token left to generate it ends in prefill."""
        return Demand(
            prefill_tokens=len(self.spec.prompt_token_ids) + len(self.answer.token_ids),
            decode_tokens=self.spec.max_kv_tokens if self.answer.num_left > 1 else 0,
            batch=self.spec.batch_priority,
            avoid=avoid,
        )

    async def deliver(self, delta: generation_pb2.Delta) -> None:
        """One message with what is new, unless nothing is."""
        if delta.token_ids or delta.text:
            self.clock.mark_first_token()
            await self.send(
                generation_pb2.GenerateResponse(delta=delta, request_id=self.spec.request_id)
            )

    def ending(self, reason: common_pb2.FinishReason.ValueType) -> Ending:
        """The end that a worker decided; a stop token is named as text."""
        if reason == common_pb2.FINISH_REASON_UNSPECIFIED:
            raise WorkerFaultError("a worker finished the answer without saying why")
        if reason == common_pb2.FINISH_REASON_STOP and self.answer.token_ids:
            return Ending(reason, self.token_text(self.answer.token_ids[-1]))
        return Ending(reason)


async def live(life: Life, admission: Admission, pool: PoolView, max_attempts: int) -> Ending:
    """Sees one parsed request through to its last token; `finish` then tells how it went.

    Each round of the loop is one attempt on a pair of workers. An attempt that ends early leaves
    the tokens already delivered in `life.answer`; the next one replays them as part of its prompt,
    and since sampling depends on (seed, index) alone, the answer goes on as if nothing had been.

    Raises:
        RequestError: the request failed; what it held on any worker is free.
    """
    entry = admission.enter()
    demand = life.demand(frozenset())
    while True:
        life.clock.enter(Phase.QUEUE)
        placement = await admission.place(entry, demand, first=life.tries == 0)
        life.tries += 1
        try:
            ending = await attempt(life, placement)
            for view in (placement.prefill, placement.decode):
                if view is not None:
                    view.failed_requests.clear()
            return ending
        except AttemptEndedError as error:
            log.info("request %s, try %d: %s", life.spec.request_id, life.tries, error)
            last = error
        finally:
            placement.release()
        if isinstance(last, WorkerFailedError):
            pool.note_failure(last.view, life.spec.request_id)
            life.moves += 1
        else:
            last.view.full = True
            life.refusals += isinstance(last, RefusedError)
        if max(life.moves, life.refusals) >= max_attempts:
            raise unavailable(
                f"request {life.spec.request_id!r} failed {max_attempts} times "
                f"(limit {max_attempts}); last: {last}"
            )
        avoid = demand.avoid
        if not isinstance(last, NoRoomError):
            avoid |= {last.view.worker_id}
        demand = life.demand(avoid)
        if life.answer.num_left == 0:  # only the word that this was the end is lost
            life.clock.enter(Phase.DELIVERY)
            delta = life.answer.take([], finished=True)
            return await _deliver_last(life, delta, True, common_pb2.FINISH_REASON_LENGTH)


async def attempt(life: Life, placement: Placement) -> Ending:
    """One try on a pair of workers; ends with no call open and nothing held on either.

    Raises:
        AttemptEndedError: another try may go on from `life.answer`.
    """
    spec, answer, clock = life.spec, life.answer, life.clock
    key = worker_pb2.AttemptKey(request_id=spec.request_id, attempt=life.tries)
    token_ids = [*spec.prompt_token_ids, *answer.token_ids]
    request = worker_pb2.PrefillRequest(
        key=key,
        token_ids=token_ids,
        num_prompt_tokens=len(spec.prompt_token_ids),
        sampling=spec.sampling,
        eos_token_ids=spec.eos_token_ids,
        cache_salt=spec.cache_salt,
    )
    prefill: PrefillCall | None = None
    decode: DecodeCall | None = None
    handoff: asyncio.Task[worker_pb2.HandoffDone] | None = None
    try:
        # A ticket first: KV is never computed without a place for it to go.
        if placement.decode is not None:
            clock.enter(Phase.TICKET)
            decode = DecodeCall(placement.decode, life.seconds_left())
            ticket = await decode.reserve(
                worker_pb2.Reserve(
                    key=key, num_handoff_tokens=len(token_ids), max_kv_tokens=spec.max_kv_tokens
                )
            )
            request.ticket.CopyFrom(ticket)
            request.decode_address = placement.decode.endpoint.address

        # Prefill: the first token goes to the client while the KV is still moving.
        clock.enter(Phase.PREFILL)
        life.timings.prefill_worker = placement.prefill.worker_id
        prefill = PrefillCall(placement.prefill, request, life.seconds_left())
        first = await prefill.first_token()
        placement.computed()
        _count_prefill(life.timings, first, len(token_ids))
        life.cached_prompt_tokens = min(first.cached_tokens, len(spec.prompt_token_ids))
        if first.finish_reason == common_pb2.FINISH_REASON_CANCELLED:
            raise WorkerFailedError(placement.prefill, "it ended the sequence early")
        # Without a decode worker this is the end, whatever prefill says of it.
        delta = answer.take([first.token], finished=first.finished or decode is None)
        ended = first.finished or answer.stopped_by is not None
        if decode is None or placement.decode is None or ended:
            clock.enter(Phase.DELIVERY)
            return await _deliver_last(life, delta, first.finished, first.finish_reason)
        clock.enter(Phase.HANDOFF)
        await life.deliver(delta)

        # Hand-off: decode begins when it has both the first token and all of the KV.
        handoff = asyncio.create_task(_hand_off(prefill, placement))
        handoff.add_done_callback(_seen)
        await decode.start(
            worker_pb2.Start(
                token_ids=[*spec.prompt_token_ids, *answer.token_ids],
                num_prompt_tokens=len(spec.prompt_token_ids),
                sampling=spec.sampling,
                eos_token_ids=spec.eos_token_ids,
            )
        )
        await _join(decode, handoff)

        # Decode: one message to the client for each from the worker; the next is read when gRPC
        # took it, so a slow client holds back its own stream and fills no buffer here.
        clock.enter(Phase.DECODE)
        life.timings.decode_worker = placement.decode.worker_id
        before = generation_pb2.Timings()
        before.CopyFrom(life.timings)
        while True:
            tokens = await decode.tokens()
            life.timings.decode_forwards = before.decode_forwards + tokens.decode_forwards
            life.timings.kv_tokens_written = before.kv_tokens_written + tokens.decode_forwards
            life.timings.decode_model_s = before.decode_model_s + tokens.model_s
            cut_short = tokens.finish_reason == common_pb2.FINISH_REASON_CANCELLED
            delta = answer.take(tokens.tokens, finished=tokens.finished and not cut_short)
            if (tokens.finished and not cut_short) or answer.stopped_by is not None:
                clock.enter(Phase.DELIVERY)
                decode.close()
                ending = await _deliver_last(life, delta, tokens.finished, tokens.finish_reason)
                await _count_handoff(life.timings, handoff)
                return ending
            await life.deliver(delta)
            if cut_short:
                raise WorkerFailedError(placement.decode, "it ended the sequence early")
    finally:
        if handoff is not None:
            handoff.cancel()
        for call in (prefill, decode):
            if call is not None:
                call.close()


async def finish(life: Life, ending: Ending) -> None:
    """The last message: why it ended, what it used, where the time went."""
    timings = life.timings
    timings.attempts = 1 + life.moves
    life.clock.write_to(timings)
    await life.send(
        generation_pb2.GenerateResponse(
            finish=generation_pb2.Finish(
                finish_reason=ending.finish_reason,
                usage=generation_pb2.Usage(
                    prompt_tokens=len(life.spec.prompt_token_ids),
                    completion_tokens=len(life.answer.token_ids),
                    seed=life.spec.sampling.seed,
                    cached_prompt_tokens=life.cached_prompt_tokens,
                ),
                timings=timings,
                stop_reason=ending.stop_reason,
            ),
            request_id=life.spec.request_id,
        )
    )


async def _deliver_last(
    life: Life,
    delta: generation_pb2.Delta,
    finished: bool,
    reason: common_pb2.FinishReason.ValueType,
) -> Ending:
    """Delivers the last tokens. A stop string outranks what the worker says."""
    await life.deliver(delta)
    stopped_by = life.answer.stopped_by
    if stopped_by is not None:
        return Ending(common_pb2.FINISH_REASON_STOP, stopped_by)
    if not finished:  # max_tokens left nothing for a decode worker to do
        return Ending(common_pb2.FINISH_REASON_LENGTH)
    return life.ending(reason)


async def _hand_off(prefill: PrefillCall, placement: Placement) -> worker_pb2.HandoffDone:
    """Waits for the hand-off; then the prefill worker holds nothing of the attempt."""
    assert placement.decode is not None, "a hand-off has two sides"
    done = await prefill.handoff(placement.decode)
    placement.handed_over()
    return done


def _seen(task: asyncio.Task[Any]) -> None:
    """Marks the task's exception as looked at: whoever still needs the result asks for it."""
    if not task.cancelled():
        task.exception()


async def _join(decode: DecodeCall, handoff: asyncio.Task[worker_pb2.HandoffDone]) -> None:
    """Waits until the sequence is in the batch, or the hand-off failed."""
    joined = asyncio.create_task(decode.joined())
    joined.add_done_callback(_seen)
    try:
        await asyncio.wait({joined, handoff}, return_when=asyncio.FIRST_COMPLETED)
        if not joined.done():
            handoff.result()  # raises where the KV did not arrive
        await joined
    finally:
        joined.cancel()


async def _count_handoff(
    timings: generation_pb2.Timings, handoff: asyncio.Task[worker_pb2.HandoffDone]
) -> None:
    """Adds the hand-off's figures; they may be missing where prefill died after the commit."""
    await asyncio.wait({handoff}, timeout=HANDOFF_FIGURES_TIMEOUT_S)
    if handoff.done() and handoff.exception() is None:
        timings.kv_bytes_handed_over += handoff.result().kv_bytes
        timings.kv_transfer_s += handoff.result().transfer_s


def _count_prefill(
    timings: generation_pb2.Timings, first: worker_pb2.FirstToken, num_tokens: int
) -> None:
    timings.prefill_forwards += first.prefill_forwards
    timings.prefill_wait_s += first.wait_s
    timings.prefill_model_s += first.model_s
    timings.kv_tokens_written += num_tokens - first.cached_tokens
