"""Handover: an attempt's KV on its way into a decode worker's batch, that one's loss included."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from legato.cluster.attempt_errors import (
    AttemptEndedError,
    KvGoneError,
    KvLapsedError,
    PathFailedError,
    WorkerFailedError,
    WorkerFaultError,
)
from legato.cluster.cancellation import all_ended
from legato.cluster.worker_calls import DecodeCall
from legato.cluster.worker_view import ViewState
from legato.protos import worker_pb2
from legato.protos.printable import printable

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from legato.cluster.answer_life import AnswerLife, Group
    from legato.cluster.attempt_placement import Placement
    from legato.cluster.request_life import RequestLife
    from legato.cluster.worker_calls import PrefillCall

T = TypeVar("T")


class Handover:
    """From the beginning of prefill until the answers are in a decode worker's batch.

    Runs beside the prefill and whether the client reads or not: rows that have landed and are not
    started can be taken from nobody. Where the decode worker is lost, before or after the first
    token, or the KV does not get there, it takes a ticket on another one, and the prefill worker,
    which keeps the KV for a while, sends it there. `placement` and `decode` are those of the
    present decode worker.
    """

    def __init__(
        self,
        life: RequestLife,
        group: Group,
        placement: Placement,
        decode: DecodeCall,
        prefill: PrefillCall,
        reserve: worker_pb2.Reserve,
    ) -> None:
        """`group`: those that go on; whoever ends is taken out. `reserve`: as it was granted."""
        self.placement = placement
        self.decode = decode
        self.joined_at_s = 0.0  # on the monotonic clock
        self.num_retargets = 0
        self._life = life
        self._number = reserve.key.attempt
        self._group = group
        self._prefill = prefill
        self._reserve = reserve
        self._tokens: Mapping[int, int] = {}
        self._model_s = 0.0
        self._answers: Sequence[AnswerLife] = ()  # those that go on, once that is known
        self._started = asyncio.Event()  # the first tokens are known
        self._has_no_decode = False  # it was given up, and no other has been found yet
        self._handoff = _spawn(self._follow_handoff())
        self._joining = _spawn(self._run())

    def start(self, tokens: Mapping[int, int], model_s: float) -> None:
        """The first tokens of the answers that go on, by their number: decode may begin. `model_s`:
        of the prefill.
        """
        self._tokens, self._model_s = tokens, model_s
        self._answers = tuple(self._group.values())
        self._started.set()

    async def joined(self) -> None:
        """Waits until the first of the answers is in the batch.

        Raises:
            AttemptEndedError: the KV is lost, or cannot get to any decode worker in time.
            RequestError: too many workers were lost, or none can take it.
        """
        await asyncio.wait({self._joining})
        self._joining.result()

    async def unless_it_ends(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of `work`, before `start`; where no decode worker can be had, that error."""
        task = _spawn(work)
        try:
            await asyncio.wait({task, self._joining}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._joining.result()
                raise WorkerFaultError("a decode worker says that it joined before the start")
            return task.result()
        finally:
            task.cancel()

    async def figures(self, until_s: float) -> None:
        """Waits up to that moment of the monotonic clock for what the prefill worker counted."""
        if not self._handoff.done():
            await asyncio.wait({self._handoff}, timeout=max(0.0, until_s - time.monotonic()))

    def close(self) -> None:
        """Nothing is held any more on the decode worker or of the prefill worker's share. To be
        called again after `ended`, for what was taken in between. Idempotent.
        """
        self.decode.close()
        self.placement.release()
        self._handoff.cancel()
        self._joining.cancel()

    async def ended(self) -> None:
        """Waits until nothing is under way any more, after `close`."""
        await all_ended((self._handoff, self._joining))

    async def _run(self) -> None:
        while True:
            try:
                await self._join()
            except WorkerFailedError as error:
                if error.view is not self.decode.view or _is_over(self._handoff):
                    raise
                await self._move(error)
            except PathFailedError as error:
                if not self._life.keeps_prefill(error, self.placement.demand):
                    raise
                await self._move(error)
            else:
                self.joined_at_s = time.monotonic()
                return

    async def _join(self) -> None:
        # The worker says nothing between ticket and start: a read there tells only of its loss.
        joined = _spawn(self.decode.joined())
        starting = _spawn(self._started.wait())
        try:
            await asyncio.wait({joined, starting}, return_when=asyncio.FIRST_COMPLETED)
            if joined.done():
                joined.result()
                raise WorkerFaultError(f"worker {self.decode.view.worker_id} joined unasked")
            await self.decode.start(self._tokens)
            await asyncio.wait({joined, self._handoff}, return_when=asyncio.FIRST_COMPLETED)
            if not joined.done():
                self._handoff.result()  # raises where the KV did not arrive
            await joined
        except KvLapsedError as error:
            raise self._path_failed(error.reason) from None
        finally:
            joined.cancel()
            starting.cancel()

    # The prefill worker's side.

    async def _follow_handoff(self) -> None:
        """Until the KV is with the present decode worker: then prefill holds nothing of it."""
        await self._started.wait()
        while True:
            event = await self._prefill.handoff()
            if event is None:
                if self._has_no_decode or self.num_retargets:
                    raise KvGoneError(self._prefill.view, "it kept the KV for as long as it does")
                raise WorkerFailedError(self._prefill.view, "its stream ended before handoff_done")
            stale = event.num_retargets != self.num_retargets or self._has_no_decode
            if isinstance(event, worker_pb2.HandoffFailed):
                reason = printable(event.reason)
                if not event.decode_lost:
                    raise WorkerFailedError(self._prefill.view, f"hand-off failed: {reason}")
                if not stale:
                    raise self._path_failed(reason, refused=event.refused)
                continue
            if stale:
                raise KvGoneError(
                    self._prefill.view, "the KV had arrived at a decode worker that was lost then"
                )
            for answer in self._answers:
                answer.count_handoff(event)
            path = self.placement.prefill.worker_id, self.decode.view.worker_id
            num_rows = len(self._reserve.token_ids)
            self._life.pool.learnt.paths.note(path, event, num_rows, self._model_s)
            self._life.note_passed(self.placement, self._answers)
            self.placement.handed_over()
            return

    def _path_failed(self, reason: str, *, refused: bool = False) -> AttemptEndedError:
        """Unless the router lacks the decode worker as well: then it is that one's loss."""
        prefill, decode = self._prefill.view, self.decode.view
        if decode.state is not ViewState.READY:
            return WorkerFailedError(decode, f"hand-off failed: {reason}", gone=True)
        error = PathFailedError(prefill, decode, reason, refused=refused)
        self._life.pool.paths.failed(error.path)
        return error

    # Another decode worker.

    async def _move(self, lost: AttemptEndedError) -> None:
        self._has_no_decode = True
        if self._handoff.done():  # it has told of the failure; now it watches that the KV is kept
            self._handoff = _spawn(self._follow_handoff())
        taking = _spawn(self._take_ticket(lost))
        try:
            await asyncio.wait({taking, self._handoff}, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                self._handoff.result()
            ticket = taking.result()
        finally:
            taking.cancel()
            await all_ended((taking,))  # it may still hold a place in the queue
        self._has_no_decode = False
        self.num_retargets += 1
        await self._prefill.retarget(ticket, self.decode.view.endpoint.address)
        for answer in self._group.values():
            answer.timings.retargets += 1
            answer.record.retargeted(self.decode.view.worker_id)
            answer.note("retargeted", attempt=self._number, decode=self.decode.view.worker_id)

    async def _take_ticket(self, lost: AttemptEndedError) -> worker_pb2.KvTicket:
        """Asks one decode worker after the other, as the queue finds room on them."""
        life, error = self._life, lost
        while True:
            self.decode.close()
            self.placement.give_up_decode()
            answers = tuple(self._group.values())
            life.note_end(error, self.placement.demand, answers, kv_under_way=True)
            first = answers[0]
            demand = replace(self.placement.demand, avoid=first.avoid)
            self.placement = await life.admission.place(
                first.entry, demand, first=False, keep=self.placement
            )
            assert self.placement.decode is not None, "there is something to decode"
            life.tries += 1
            self._reserve.key.attempt = life.tries
            try:
                self.decode = DecodeCall(
                    self.placement.decode, life.seconds_left(), life.record.trace
                )
                ticket = await self.decode.reserve(self._reserve)
            except AttemptEndedError as ended:
                error = ended
            else:
                self.placement.granted()
                return ticket


def _is_over(handoff: asyncio.Task[None]) -> bool:
    """Whether the prefill worker has given the KV away: it has nothing left to send elsewhere."""
    return handoff.done() and not handoff.cancelled() and handoff.exception() is None


def _spawn(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    task = asyncio.create_task(work)
    task.add_done_callback(_seen)
    return task


def _seen(task: asyncio.Task[T]) -> None:
    """Marks the task's exception as looked at: whoever still needs the result asks for it."""
    if not task.cancelled():
        task.exception()
