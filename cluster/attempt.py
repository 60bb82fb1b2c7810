"""Attempt: one try at a group of answers: ticket, prefill, hand-off, decode."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from legato.cluster.answer_life import DecodeFigures, enter
from legato.cluster.handover import Handover
from legato.cluster.policies import prefills_locally
from legato.cluster.timings import Phase
from legato.cluster.worker_calls import (
    DecodeCall,
    PrefillCall,
    WorkerFailedError,
    WorkerFaultError,
)
from legato.protos import common_pb2, worker_pb2

if TYPE_CHECKING:
    from legato.cluster.answer import Ending
    from legato.cluster.answer_life import AnswerLife, Group
    from legato.cluster.attempt_placement import Placement
    from legato.cluster.policies import Demand
    from legato.cluster.request_life import RequestLife
    from legato.protos import generation_pb2

    News = list[tuple[AnswerLife, generation_pb2.Delta, Ending | None]]

# The hand-off's figures are sent right after the commit that lets decode begin.
HANDOFF_FIGURES_TIMEOUT_S = 1.0


class Attempt:
    """On a prefill and a decode worker, or where either is not needed on one alone.

    An answer that ends or goes on alone is taken out of `group`. A decode worker that is lost
    before it has begun is replaced on the way (`Handover`).
    """

    def __init__(self, life: RequestLife, group: Group, placement: Placement) -> None:
        self._life = life
        self._group = group
        self._placement = placement
        self._decode: DecodeCall | None = None
        self._prefill: PrefillCall | None = None
        self._handover: Handover | None = None

    async def run(self) -> None:
        """Returns when no answer is left in the group; then, and where it raises, no call is open
        and nothing is held on any worker.

        Raises:
            AttemptEndedError: another try may go on with those that are left.
            RequestError: no other is to be made.
        """
        try:
            await self._serve()
        finally:
            self._close()
            if self._handover is not None:
                try:
                    await self._handover.ended()
                finally:
                    self._close()

    def _close(self) -> None:
        """Idempotent."""
        if self._handover is not None:
            self._handover.close()
        for call in (self._prefill, self._decode):
            if call is not None:
                call.close()
        self._placement.release()

    async def _serve(self) -> None:
        life, group, placement = self._life, self._group, self._placement
        request = _prefill_request(life, group)
        reserve: worker_pb2.Reserve | None = None
        placed_at_s = time.monotonic()

        # A ticket first: KV is never computed without a place for it to go.
        if placement.decode is not None:
            enter(group.values(), Phase.TICKET)
            self._decode = DecodeCall(placement.decode, life.seconds_left())
            reserve = _reserve(placement.demand, group, request)
            request.ticket.CopyFrom(await self._decode.reserve(reserve))
            request.decode_address = placement.decode.endpoint.address
            placement.granted()
        ticket_at_s = time.monotonic()

        # Prefill: the first tokens go to the client while the KV is still moving.
        life.has_begun = True
        enter(group.values(), Phase.PREFILL)
        may_be_local = self._may_be_local(request)
        if self._decode is not None and may_be_local and self._is_local(request):
            placement.handed_over()
            first = await self._decode.start_locally()
            tokens, news = self._take_first(first, self._decode.view.worker_id)
        else:
            first = await self._compute(request, reserve)
            tokens, news = self._take_first(first, placement.prefill.worker_id)
        life.admission.times.note_start(len(request.token_ids), time.monotonic() - placed_at_s)
        if not group:
            self._close()
        elif self._handover is not None:
            self._handover.start(tokens, first.model_s)
        for answer, delta, ending in news:
            await life.deliver(answer, delta, ending)
        if not group:
            self._note_success()
            return

        if self._handover is not None:
            await self._handover.joined()
            if may_be_local and not self._handover.num_retargets:
                spent_s = self._handover.joined_at_s - ticket_at_s
                life.costs.note_overhead(max(0.0, spent_s - first.wait_s - first.model_s))
            self._decode = self._handover.decode
        else:
            assert self._decode is not None, "without a decode worker the first token is the last"
            await self._decode.joined()
        await self._pass_on(self._decode)
        self._note_success()

    # --- prefill ------------------------------------------------------------------------------

    def _may_be_local(self, request: worker_pb2.PrefillRequest) -> bool:
        """Whether it is so short for the decode worker that either way might be taken."""
        uncached = len(request.token_ids) - request.ticket.cached_tokens
        return (
            request.HasField("ticket")
            and request.num_answers == 1
            and uncached <= self._life.local_prefill_tokens
        )

    def _is_local(self, request: worker_pb2.PrefillRequest) -> bool:
        placement, life = self._placement, self._life
        assert placement.decode is not None, "it has given a ticket"
        load = placement.decode.load
        return prefills_locally(
            len(request.token_ids) - request.ticket.cached_tokens,
            placement.prefill.backlog_tokens - placement.prefill_share.backlog_tokens,
            life.costs.costs(load.local_prefill_token_s if load is not None else 0.0),
            life.local_prefill_tokens,
        )

    async def _compute(
        self, request: worker_pb2.PrefillRequest, reserve: worker_pb2.Reserve | None
    ) -> worker_pb2.FirstToken:
        """On the prefill worker; the hand-off begins with it."""
        life, placement = self._life, self._placement
        self._prefill = PrefillCall(placement.prefill, life.seconds_left())
        await self._prefill.begin(request)
        num_answers = len(self._group)
        if self._decode is None or reserve is None:
            first = await self._prefill.first_token(num_answers)
        else:
            self._handover = Handover(
                life, self._group, placement, self._decode, self._prefill, reserve
            )
            first = await self._handover.unless_it_ends(self._prefill.first_token(num_answers))
        placement.computed()
        life.costs.note_prefill(first.model_s, len(request.token_ids) - first.cached_tokens)
        return first

    def _take_first(
        self, first: worker_pb2.FirstToken, worker_id: str
    ) -> tuple[dict[int, int], News]:
        """The tokens of the answers that go on, by their number, and what is to be told."""
        tokens: dict[int, int] = {}
        news: News = []
        for (number, answer), start in zip(tuple(self._group.items()), first.answers, strict=True):
            answer.count_prefill(first, worker_id)
            reason = start.finish_reason if start.finished else None
            if self._decode is None and reason is None:  # max_tokens leaves nothing to decode
                reason = common_pb2.FINISH_REASON_LENGTH
            delta, ending = answer.take([start.token], reason)
            news.append((answer, delta, ending))
            answer.clock.enter(Phase.HANDOFF if ending is None else Phase.DELIVERY)
            if ending is not None:
                del self._group[number]
            else:
                tokens[number] = start.token.token_id
        return tokens, news

    # --- decode -------------------------------------------------------------------------------

    async def _pass_on(self, decode: DecodeCall) -> None:
        """One message to the client for each from the worker; the next is read when gRPC took it,
        so a slow client holds back its own stream and fills no buffer here.
        """
        life, group = self._life, self._group
        enter(group.values(), Phase.DECODE)
        figures_due_s = time.monotonic() + HANDOFF_FIGURES_TIMEOUT_S
        figures = {n: DecodeFigures(a, decode.view.worker_id) for n, a in group.items()}
        stopped: set[int] = set()
        while group:
            asked_at_s = time.monotonic()
            event = await decode.next_of_answer()
            waited_s = time.monotonic() - asked_at_s
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
            life.admission.times.note_output(len(event.tokens), waited_s * len(group))
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
                if self._handover is not None:
                    await self._handover.figures(figures_due_s)
                if not group:
                    self._close()
            await life.deliver(answer, delta, ending)
            if ending is None and cut_short:
                raise WorkerFailedError(decode.view, "it ended the sequence early")

    def _note_success(self) -> None:
        """Those that served have failed nobody since."""
        for call in (self._prefill, self._decode):
            if call is not None:
                call.view.failed_requests.clear()


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
