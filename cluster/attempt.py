"""Attempt: one try at a group of answers: ticket, prefill, hand-off, decode."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from legato.cluster.answer_life import enter
from legato.cluster.decode_stream import DecodeStream
from legato.cluster.handover import Handover
from legato.cluster.policies import prefills_locally
from legato.cluster.timings import Phase
from legato.cluster.worker_calls import DecodeCall, PrefillCall
from legato.protos import common_pb2, worker_pb2

if TYPE_CHECKING:
    from legato.cluster.answer import Ending
    from legato.cluster.answer_life import AnswerLife, Group
    from legato.cluster.attempt_placement import Placement
    from legato.cluster.request_life import RequestLife
    from legato.protos import generation_pb2

    News = list[tuple[AnswerLife, generation_pb2.Delta, Ending | None]]

# The hand-off's figures are sent right after the commit that lets decode begin.
HANDOFF_FIGURES_TIMEOUT_S = 1.0
# What the remote way costs beside the model is measured on prompts as short as this at least: of
# long ones the hand-off goes on while they are computed.
MEASURED_TOKENS = 128


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
        self._number = life.tries

    async def run(self) -> None:
        """Returns when no answer is left in the group; then, and where it raises, no call is open
        and nothing is held on any worker.

        Raises:
            AttemptEndedError: another try may go on with those that are left.
            RequestError: no other is to be made.
        """
        prefill, decode = self._placement.prefill, self._placement.decode
        for answer in self._group.values():
            answer.note_begun(
                self._number, prefill.worker_id, decode.worker_id if decode is not None else None
            )
        try:
            await self._serve()
        finally:
            self._close()
            try:
                if self._handover is not None:
                    await self._handover.ended()
            finally:
                self._close()
                for answer in self._group.values():
                    answer.note_left(self._number)

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
        if placement.is_colocated:
            request.num_answers = 1
        reserve: worker_pb2.Reserve | None = None
        placed_at_s = time.monotonic()

        # A ticket first: KV is never computed without a place for it to go.
        if placement.decode is not None:
            enter(group.values(), Phase.TICKET)
            self._decode = DecodeCall(placement.decode, life.seconds_left())
            reserve = _reserve(placement, group, request)
            request.ticket.CopyFrom(await self._decode.reserve(reserve))
            request.decode_address = placement.decode.endpoint.address
            placement.granted()
        ticket_at_s = time.monotonic()

        # Prefill: the first tokens go to the client while the KV is still moving.
        life.has_begun = True
        enter(group.values(), Phase.PREFILL)
        may_be_local = self._is_short(request, life.local_prefill_tokens)
        if self._decode is not None and placement.is_colocated:
            first = await self._decode.start_locally()
            placement.computed()
            tokens, news = self._take_first(first, self._decode.view.worker_id)
            self._let_others_go()
        elif self._decode is not None and may_be_local and self._is_local(request):
            placement.handed_over()
            first = await self._decode.start_locally()
            tokens, news = self._take_first(first, self._decode.view.worker_id)
        else:
            first = await self._compute(request, reserve)
            tokens, news = self._take_first(first, placement.prefill.worker_id)
        life.admission.times.note_start(time.monotonic() - placed_at_s)
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
            limit = max(life.local_prefill_tokens, MEASURED_TOKENS)
            if self._is_short(request, limit) and not self._handover.num_retargets:
                spent_s = self._handover.joined_at_s - ticket_at_s
                life.costs.note_overhead(max(0.0, spent_s - first.wait_s - first.model_s))
            self._decode, self._placement = self._handover.decode, self._handover.placement
        else:
            assert self._decode is not None, "without a decode worker the first token is the last"
            await self._decode.joined()
        await self._pass_on(self._decode)
        self._note_success()

    # --- prefill ------------------------------------------------------------------------------

    def _is_short(self, request: worker_pb2.PrefillRequest, limit: int) -> bool:
        """Whether the decode worker lacks the KV of so few tokens of the only answer's prompt."""
        uncached = len(request.token_ids) - request.ticket.cached_tokens
        # Where the decode worker has KV already there would be no logits of the prompt.
        scored = request.sampling.HasField("prompt_logprobs")
        may_be = request.HasField("ticket") and request.num_answers == 1 and not scored
        return may_be and uncached <= limit

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
        self._life.prompt_logprobs.take(first)
        tokens: dict[int, int] = {}
        news: News = []
        begun = tuple(self._group.items())[: len(first.answers)]
        for (number, answer), start in zip(begun, first.answers, strict=True):
            answer.count_prefill(first, worker_id)
            reason = start.finish_reason if start.finished else None
            if self._decode is None and reason is None:  # max_tokens leaves nothing to decode
                reason = common_pb2.FINISH_REASON_LENGTH
            delta, ending = answer.take([start.token], reason)
            news.append((answer, delta, ending))
            answer.enter(Phase.HANDOFF if ending is None else Phase.DELIVERY)
            if ending is not None:
                self._group.pop(number).note_left(self._number)
            else:
                tokens[number] = start.token.token_id
        return tokens, news

    def _let_others_go(self) -> None:
        """A colocated worker has begun the first answer; the others find its prompt's KV there."""
        for number in [n for n in self._group if n > 0]:
            answer = self._group.pop(number)
            answer.note_left(self._number)
            self._life.go_on_alone(answer)

    # --- decode -------------------------------------------------------------------------------

    async def _pass_on(self, decode: DecodeCall) -> None:
        figures_due_s = time.monotonic() + HANDOFF_FIGURES_TIMEOUT_S

        async def figures() -> None:
            if self._handover is not None:
                await self._handover.figures(figures_due_s)

        stream = DecodeStream(
            self._life,
            self._group,
            decode,
            self._placement,
            attempt=self._number,
            on_end=self._close,
            before_end=figures,
        )
        await stream.pass_on()

    def _note_success(self) -> None:
        """Those that served have failed nobody since."""
        for call in (self._prefill, self._decode):
            if call is not None:
                call.view.failed_requests.clear()


def _prefill_request(life: RequestLife, group: Group) -> worker_pb2.PrefillRequest:
    spec, first = life.spec, group[0]
    request = worker_pb2.PrefillRequest(
        key=worker_pb2.AttemptKey(request_id=spec.request_id, attempt=life.tries),
        token_ids=first.token_ids,
        num_prompt_tokens=len(spec.prompt_token_ids),
        sampling=spec.sampling_of(first.index),
        eos_token_ids=spec.eos_token_ids,
        cache_salt=spec.cache_salt,
        num_answers=len(group),
    )
    life.prompt_logprobs.ask(request.sampling)
    return request


def _reserve(
    placement: Placement, group: Group, request: worker_pb2.PrefillRequest
) -> worker_pb2.Reserve:
    batch = placement.demand.batch
    reserve = worker_pb2.Reserve(
        key=request.key,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        eos_token_ids=request.eos_token_ids,
        cache_salt=request.cache_salt,
        priority=common_pb2.PRIORITY_BATCH if batch else common_pb2.PRIORITY_INTERACTIVE,
        arrival=group[0].entry.arrival,
        num_preemptions=group[0].num_preemptions,
        num_answers=request.num_answers,
    )
    if not placement.is_colocated:  # it does not compute the prompt
        reserve.sampling.ClearField("prompt_logprobs")
    return reserve
