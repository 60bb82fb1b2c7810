"""One request's life: queue, ticket, prefill, hand-off, decode; again where a worker is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from legato.cluster import blame
from legato.cluster.answer_life import enter
from legato.cluster.arrival import stay
from legato.cluster.attempt import Attempt
from legato.cluster.attempt_errors import (
    AttemptEndedError,
    KvGoneError,
    NoRoomError,
    PathFailedError,
    RefusedError,
    WorkerFailedError,
)
from legato.cluster.error_reasons import Reason
from legato.cluster.errors import RequestError, unavailable
from legato.cluster.path_policies import gives_up, has_open_path, is_cut_off, keeps_prefill
from legato.cluster.policies import Demand
from legato.cluster.roles import PAIR
from legato.cluster.timings import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from legato.cluster.admission import Admission
    from legato.cluster.answer import Ending
    from legato.cluster.answer_life import AnswerLife
    from legato.cluster.attempt_placement import Placement
    from legato.cluster.departure import Arrival
    from legato.cluster.path_policies import Closed
    from legato.cluster.pool_view import PoolView
    from legato.cluster.prefill_costs import PrefillCostBook
    from legato.cluster.prompt_logprobs import PromptLogprobs
    from legato.cluster.request import RequestSpec
    from legato.protos import generation_pb2

log = logging.getLogger(__name__)


@dataclass
class RequestLife:
    """What all answers to one prompt have in common."""

    spec: RequestSpec
    answers: Sequence[AnswerLife]  # those that are to be served
    admission: Admission
    pool: PoolView
    costs: PrefillCostBook
    prompt_logprobs: PromptLogprobs
    local_prefill_tokens: int
    max_attempts: int
    seconds_left: Callable[[], float]
    on_end: Callable[[], None]  # nothing is held on any worker; the last finish comes next
    tries: int = 0  # numbers each try for the workers, refused ones included
    moves: int = 0  # of its answers, to other workers after a loss
    kv_moves: int = 0  # and those with their KV, from workers that drained
    has_begun: bool = False  # a worker has taken it on
    num_open: int = field(init=False)  # answers that have not finished, as the client has it
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
            num_tokens = len(answer.answer.token_ids)
            self.admission.times.note_length(num_tokens, self.spec.max_tokens)
            if self.num_open == 0:
                self.on_end()
            await answer.finish(ending)

    def go_on_alone(self, answer: AnswerLife) -> None:
        """The answer leaves those that it was served with; they are not disturbed."""
        self.tasks.create_task(serve(self, [answer]))

    def go_on_there(self, answer: AnswerLife, arrival: Arrival) -> None:
        """The answer leaves those that it was served with: its KV is at another worker."""
        task = self.tasks.create_task(_serve_there(self, answer, arrival))
        task.add_done_callback(lambda _: arrival.close())  # also of a task that never ran

    def note_end(
        self,
        error: AttemptEndedError,
        demand: Demand,
        answers: Sequence[AnswerLife],
        *,
        kv_under_way: bool = False,
    ) -> None:
        """An attempt at `answers` ended early; raises RequestError where there were too many.

        `kv_under_way`: prefill goes on, or its KV has not arrived.
        """
        log.info("request %s: %s", self.spec.request_id, error)
        if isinstance(error, KvGoneError):
            return  # nobody's fault but that of the decode worker, whose loss is noted
        if isinstance(error, NoRoomError):
            error.view.note_refusal(demand)
            return
        if isinstance(error, PathFailedError):
            self._note_failed_path(error, demand, answers)
        else:
            self._note_worker(error, answers)
        for answer in answers:
            # One loss counts once, also where it was met first as KV that did not arrive. The end
            # of a drain is no failure.
            failed = isinstance(error, PathFailedError) or (
                isinstance(error, WorkerFailedError)
                and not error.view.departing.is_set()
                and not answer.was_out_of_reach(error.view)
            )
            answer.failures += failed
            answer.refusals += isinstance(error, RefusedError)
            if answer.was_well:
                answer.strikes = answer.refusals = 0
            elif not (isinstance(error, WorkerFailedError) and error.gone) or blame.may_be_cause(
                error.view.endpoint.role, answer.clock.phase, kv_under_way=kv_under_way
            ):
                answer.strikes += failed
            if answer.refusals >= self.max_attempts or blame.gives_up(
                answer.strikes, answer.failures, self.max_attempts
            ):
                count = max(answer.failures, answer.refusals)
                message = (
                    f"request {self.spec.request_id!r} failed {count} times "
                    f"(limit {self.max_attempts}); last: {error}"
                )
                if answer.strikes >= self.max_attempts:
                    # It seems to be what its workers die of: another try would cost more of them.
                    raise RequestError(
                        grpc.StatusCode.UNAVAILABLE,
                        message,
                        is_final=True,
                        reason=Reason.FAILS_ON_EVERY_WORKER,
                    )
                raise unavailable(message)

    def _note_worker(self, error: AttemptEndedError, answers: Sequence[AnswerLife]) -> None:
        if isinstance(error, WorkerFailedError):
            self.pool.note_failure(error.view, self.spec.request_id)
            self.moves += 1
        else:
            error.view.full = True
        for answer in answers:
            answer.avoid |= {error.view.worker_id}

    # Paths of KV. Neither worker is blamed for one that failed: see `note_passed`.

    def _note_failed_path(
        self, error: PathFailedError, demand: Demand, answers: Sequence[AnswerLife]
    ) -> None:
        now_s = time.monotonic()
        prefills, decodes, closed = self._paths(demand)
        any_open = has_open_path(prefills, decodes, closed)
        self.moves += 1
        for answer in answers:
            answer.failed_paths += (error,)
            if is_cut_off(error.prefill.worker_id, decodes, closed):
                answer.avoid |= {error.prefill.worker_id}
            if answer.no_way_since_s is None:
                answer.no_way_since_s = now_s
            if gives_up(now_s - answer.no_way_since_s, any_open=any_open):
                raise unavailable(
                    f"request {self.spec.request_id!r}: its KV gets to no decode worker; "
                    f"last: {error}"
                )

    def keeps_prefill(self, error: PathFailedError, demand: Demand) -> bool:
        """Whether the attempt goes on with another decode worker; else it is over."""
        prefills, decodes, closed = self._paths(demand)
        return keeps_prefill(error.prefill.worker_id, prefills, decodes, closed)

    def note_passed(self, placement: Placement, answers: Sequence[AnswerLife]) -> None:
        """The KV has arrived, which tells of the paths that failed before who was at fault: a
        prefill worker that is cut off from what another one reaches, or a decode worker that
        refused what another one took.
        """
        prefill, decode = placement.prefill, placement.decode
        assert decode is not None, "it has the KV"
        self.pool.paths.passed((prefill.worker_id, decode.worker_id))
        _, decodes, closed = self._paths(placement.demand)
        for failed in {error for answer in answers for error in answer.failed_paths}:
            if failed.prefill is not prefill and failed.view is decode:
                if is_cut_off(failed.prefill.worker_id, decodes, closed):
                    self.pool.note_failure(failed.prefill, self.spec.request_id)
            elif failed.refused and failed.prefill is prefill and failed.view is not decode:
                self.pool.note_failure(failed.view, self.spec.request_id)
        for answer in answers:
            answer.failed_paths, answer.no_way_since_s = (), None

    def _paths(self, demand: Demand) -> tuple[list[str], list[str], Closed]:
        """Between workers that take work such as this."""
        prefills, decodes = (
            [
                view.worker_id
                for view in self.pool.placeable(role)
                if view.snapshot().can_ever_hold(demand)
            ]
            for role in PAIR
        )
        return prefills, decodes, self.pool.paths.closed()


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
            is_new = not any(answer.answer.token_ids for answer in life.answers)
            if is_new and len(life.answers) == life.spec.num_answers:
                await serve(life, life.answers)
            else:  # of a resumed stream: only the prompt is common to them
                for answer in life.answers:
                    life.go_on_alone(answer)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _serve_there(life: RequestLife, answer: AnswerLife, arrival: Arrival) -> None:
    group = {0: answer}
    await stay(life, group, arrival)
    await serve(life, tuple(group.values()))


async def serve(life: RequestLife, answers: Sequence[AnswerLife]) -> None:
    """Tries until each of `answers` has ended, or goes on alone.

    Each round of the loop is one attempt on a pair of workers. An attempt that ends early leaves
    the tokens already delivered in the answer; the next one replays them as part of its prompt,
    and since sampling depends on (seed, index) alone, the answer goes on as if nothing had been.
    """
    while answers:
        first = answers[0]
        if first.answer.end is not None:  # only the word that this was the end is lost
            first.enter(Phase.DELIVERY)
            await life.deliver(first, *first.take([], first.answer.end))
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
            await Attempt(life, group, placement).run()
        except AttemptEndedError as error:
            life.note_end(error, placement.demand, tuple(group.values()))
        answers = tuple(group.values())
        if len(answers) > 1 and first.answer.token_ids:  # only the prompt is common to them
            for answer in answers:
                life.go_on_alone(answer)
            return


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
