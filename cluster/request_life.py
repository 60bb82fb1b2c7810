"""One request's life: queue, ticket, prefill, hand-off, decode; again where a worker is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from legato.cluster.answer_life import DecodeFigures, enter
from legato.cluster.errors import unavailable
from legato.cluster.policies import Demand
from legato.cluster.timings import Phase
from legato.cluster.worker_calls import (
    AttemptEndedError,
    DecodeCall,
    NoRoomError,
    PrefillCall,
    RefusedError,
    WorkerFailedError,
    WorkerFaultError,
)
from legato.protos import common_pb2, worker_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from legato.cluster.admission import Admission, Placement
    from legato.cluster.answer import Ending
    from legato.cluster.answer_life import AnswerLife
    from legato.cluster.pool_view import PoolView
    from legato.cluster.request import RequestSpec
    from legato.protos import generation_pb2

    Group = dict[int, AnswerLife]  # by their number in the calls to the workers

# The hand-off's figures are sent right after the commit that lets decode begin.
HANDOFF_FIGURES_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


@dataclass
class RequestLife:
    """What all answers to one prompt have in common."""

    spec: RequestSpec
    answers: Sequence[AnswerLife]
    admission: Admission
    pool: PoolView
    max_attempts: int
    seconds_left: Callable[[], float]
    on_end: Callable[[], None]  # nothing is held on any worker; the last finish comes next
    tries: int = 0  # numbers each try for the workers, refused ones included
    moves: int = 0
    has_begun: bool = False  # a worker has taken it on
    num_open: int = field(init=False)  # answers that have not finished
    tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    def __post_init__(self) -> None:
        self.num_open = len(self.answers)

    async def deliver(
        self, answer: AnswerLife, delta: generation_pb2.Delta, ending: Ending | None
    ) -> None:
        """What is new of an answer, and its finish where it has ended."""
        await answer.deliver(delta)
        if ending is not None:
            self.num_open -= 1
            if self.num_open == 0:
                self.on_end()
            await answer.finish(ending)

    def go_on_alone(self, answer: AnswerLife) -> None:
        """The answer leaves those that it was served with; they are not disturbed."""
        self.tasks.create_task(serve(self, [answer]))

    def note_end(
        self, error: AttemptEndedError, demand: Demand, answers: Sequence[AnswerLife]
    ) -> None:
        """An attempt at `answers` ended early; raises RequestError where there were too many."""
        log.info("request %s: %s", self.spec.request_id, error)
        if isinstance(error, NoRoomError):
            error.view.note_refusal(demand)
            return
        if isinstance(error, WorkerFailedError):
            self.pool.note_failure(error.view, self.spec.request_id)
            self.moves += 1
        else:
            error.view.full = True
        for answer in answers:
            answer.avoid |= {error.view.worker_id}
            answer.failures += isinstance(error, WorkerFailedError)
            answer.refusals += isinstance(error, RefusedError)
            if max(answer.failures, answer.refusals) >= self.max_attempts:
                raise unavailable(
                    f"request {self.spec.request_id!r} failed {self.max_attempts} times "
                    f"(limit {self.max_attempts}); last: {error}"
                )


async def live(life: RequestLife) -> None:
    """Sees one parsed request through to the finish of its last answer.

    The answers are served together for as long as they can be. One that has to yield its room, or
    whose worker is lost, goes on in attempts of its own. When this ends, for whatever reason, no
    call is open and nothing is held on any worker.

    Raises:
        RequestError: the request failed; the first reason where there are several.
    """
    try:
        async with life.tasks:
            await serve(life, life.answers)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def serve(life: RequestLife, answers: Sequence[AnswerLife]) -> None:
    """Tries until each of `answers` has ended, or goes on alone.

    Each round of the loop is one attempt on a pair of workers. An attempt that ends early leaves
    the tokens already delivered in the answer; the next one replays them as part of its prompt,
    and since sampling depends on (seed, index) alone, the answer goes on as if nothing had been.
    """
    while answers:
        first = answers[0]
        if first.answer.num_left == 0:  # only the word that this was the end is lost
            first.clock.enter(Phase.DELIVERY)
            await life.deliver(first, *first.take([], common_pb2.FINISH_REASON_LENGTH))
            return
        enter(answers, Phase.QUEUE)
        prefill_kv_tokens = life.pool.largest_prefill_kv_tokens()
        for answer in answers:
            answer.begin(prefill_kv_tokens)
        demand = _demand(life.spec, answers)
        placement = await life.admission.place(first.entry, demand, first=not life.has_begun)
        life.tries += 1
        group = dict(enumerate(answers))
        try:
            await attempt(life, group, placement)
            for view in (placement.prefill, placement.decode):
                if view is not None:
                    view.failed_requests.clear()
        except AttemptEndedError as error:
            life.note_end(error, placement.demand, tuple(group.values()))
        answers = tuple(group.values())
        if len(answers) > 1 and first.answer.token_ids:  # only the prompt is common to them
            for answer in answers:
                life.go_on_alone(answer)
            return


async def attempt(life: RequestLife, group: Group, placement: Placement) -> None:
    """One try at a group of answers on a pair of workers.

    An answer that ends or goes on alone is taken out of `group`. Returns when none is left; then,
    and where it raises, no call is open and nothing is held on either worker.

    Raises:
        AttemptEndedError: another try may go on with those that are left.
    """
    with contextlib.ExitStack() as held:
        held.callback(placement.release)
        request = _prefill_request(life, group)
        decode: DecodeCall | None = None

        # A ticket first: KV is never computed without a place for it to go.
        if placement.decode is not None:
            enter(group.values(), Phase.TICKET)
            decode = DecodeCall(placement.decode, life.seconds_left())
            held.callback(decode.close)
            ticket = await decode.reserve(_reserve(placement.demand, group, request))
            placement.granted()
            request.ticket.CopyFrom(ticket)
            request.decode_address = placement.decode.endpoint.address

        # Prefill: the first tokens go to the client while the KV is still moving.
        life.has_begun = True
        enter(group.values(), Phase.PREFILL)
        prefill = PrefillCall(placement.prefill, request, life.seconds_left())
        held.callback(prefill.close)
        first = await prefill.first_token(len(group))
        placement.computed()
        came, tokens = [], {}
        for (number, answer), start in zip(tuple(group.items()), first.answers, strict=True):
            answer.count_prefill(first, placement.prefill.worker_id)
            reason = start.finish_reason if start.finished else None
            if decode is None and reason is None:  # max_tokens leaves nothing to decode
                reason = common_pb2.FINISH_REASON_LENGTH
            delta, ending = answer.take([start.token], reason)
            came.append((answer, delta, ending))
            answer.clock.enter(Phase.HANDOFF if ending is None else Phase.DELIVERY)
            if ending is not None:
                del group[number]
            else:
                tokens[number] = start.token.token_id
        if not group:
            held.close()
            for answer, delta, ending in came:
                await life.deliver(answer, delta, ending)
            return
        assert decode is not None, "without a decode worker the first token is the last"
        assert placement.decode is not None, "the call is to it"

        # Hand-off: decode begins when it has both the first tokens and all of the KV, whether the
        # client reads or not: rows that have landed and are not started can be taken from nobody.
        handoff = asyncio.create_task(_hand_off(prefill, placement, tuple(group.values())))
        starting = asyncio.create_task(decode.start(tokens))
        for task in (handoff, starting):
            task.add_done_callback(_seen)
            held.callback(task.cancel)
        for answer, delta, ending in came:
            await life.deliver(answer, delta, ending)
        await starting
        await _join(decode, handoff)

        # Decode: one message to the client for each from the worker; the next is read when gRPC
        # took it, so a slow client holds back its own stream and fills no buffer here.
        enter(group.values(), Phase.DECODE)
        figures_due_s = time.monotonic() + HANDOFF_FIGURES_TIMEOUT_S
        figures = {n: DecodeFigures(a, placement.decode.worker_id) for n, a in group.items()}
        stopped: set[int] = set()
        while group:
            event = await decode.next_of_answer()
            number = event.answer
            if number in stopped:  # it was on its way when Stop was sent
                continue
            if number not in group:
                raise WorkerFaultError(
                    f"worker {decode.view.worker_id} goes on with answer {number}: it is not there"
                )
            answer = group[number]
            if isinstance(event, worker_pb2.Preempted):
                del group[number]
                answer.num_preemptions = max(answer.num_preemptions + 1, event.num_preemptions)
                life.go_on_alone(answer)
                continue
            figures[number].count(event)
            cut_short = event.finish_reason == common_pb2.FINISH_REASON_CANCELLED
            finished = event.finished and not cut_short
            delta, ending = answer.take(event.tokens, event.finish_reason if finished else None)
            if ending is not None:
                answer.clock.enter(Phase.DELIVERY)
                del group[number]
                if not finished:
                    stopped.add(number)
                    await decode.stop(number)
                    if not group:
                        await decode.end()
                await _until(handoff, figures_due_s)
                if not group:
                    held.close()
            await life.deliver(answer, delta, ending)
            if ending is None and cut_short:
                raise WorkerFailedError(placement.decode, "it ended the sequence early")


async def _until(task: asyncio.Task[Any], moment: float) -> None:
    """Waits for the task up to a moment of the monotonic clock; its exception is not raised."""
    if not task.done():
        await asyncio.wait({task}, timeout=max(0.0, moment - time.monotonic()))


async def _hand_off(
    prefill: PrefillCall, placement: Placement, answers: Sequence[AnswerLife]
) -> None:
    """Waits for the hand-off; then the prefill worker holds nothing of the attempt."""
    assert placement.decode is not None, "a hand-off has two sides"
    done = await prefill.handoff(placement.decode)
    for answer in answers:
        answer.count_handoff(done)
    placement.handed_over()


def _seen(task: asyncio.Task[Any]) -> None:
    """Marks the task's exception as looked at: whoever still needs the result asks for it."""
    if not task.cancelled():
        task.exception()


async def _join(decode: DecodeCall, handoff: asyncio.Task[None]) -> None:
    """Waits until the first of the answers is in the batch, or the hand-off failed."""
    joined = asyncio.create_task(decode.joined())
    joined.add_done_callback(_seen)
    try:
        await asyncio.wait({joined, handoff}, return_when=asyncio.FIRST_COMPLETED)
        if not joined.done():
            handoff.result()  # raises where the KV did not arrive
        await joined
    finally:
        joined.cancel()


def _demand(spec: RequestSpec, answers: Sequence[AnswerLife]) -> Demand:
    """What the next attempt needs. With one token left to generate it ends in prefill."""
    first = answers[0]
    return Demand(
        prefill_tokens=len(first.token_ids),
        decode_tokens=spec.max_kv_tokens if first.num_to_come > 1 else 0,
        num_answers=len(answers),
        batch=spec.batch_priority,
        avoid=first.avoid,
    )


def _prefill_request(life: RequestLife, group: Group) -> worker_pb2.PrefillRequest:
    spec, first = life.spec, group[0]
    return worker_pb2.PrefillRequest(
        key=worker_pb2.AttemptKey(request_id=spec.request_id, attempt=life.tries),
        token_ids=first.token_ids,
        num_prompt_tokens=len(spec.prompt_token_ids),
        sampling=spec.sampling_of(first.index),
        eos_token_ids=spec.eos_token_ids,
        cache_salt=spec.cache_salt,
        num_answers=len(group),
    )


def _reserve(
    demand: Demand, group: Group, request: worker_pb2.PrefillRequest
) -> worker_pb2.Reserve:
    return worker_pb2.Reserve(
        key=request.key,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        eos_token_ids=request.eos_token_ids,
        cache_salt=request.cache_salt,
        priority=common_pb2.PRIORITY_BATCH if demand.batch else common_pb2.PRIORITY_INTERACTIVE,
        arrival=group[0].entry.arrival,
        num_preemptions=group[0].num_preemptions,
        num_answers=len(group),
    )
