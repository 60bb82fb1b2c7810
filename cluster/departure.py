"""Departure: one running answer's way from a decode worker that drains to another, with its KV."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from legato.cluster.attempt_errors import (
    AttemptEndedError,
    NoRoomError,
    WorkerFailedError,
    WorkerFaultError,
)
from legato.cluster.errors import RequestError
from legato.cluster.policies import Demand
from legato.cluster.worker_calls import DecodeCall
from legato.protos import common_pb2, worker_pb2
from legato.protos.printable import printable

if TYPE_CHECKING:
    from legato.cluster.answer_life import AnswerLife
    from legato.cluster.attempt_placement import Placement
    from legato.cluster.request_life import RequestLife


# The word that it is parked comes behind all its tokens, which a slow client may hold up: that one
# has something to read meanwhile. It does not hold up others that are to leave for longer than
# this.
SLOW_S = 1.0
PARK_TIMEOUT_S = 20.0
TICKET_TIMEOUT_S = 2.0  # the answer stands still meanwhile
AGAIN_S = 0.5  # after a move that failed

log = logging.getLogger(__name__)


class _MoveFailedError(Exception):
    """The answer goes on where it is."""


@dataclass(frozen=True)
class Arrival:
    """Where an answer goes on: its KV is there."""

    call: DecodeCall
    placement: Placement
    attempt: int  # as the ticket there has it
    joined: asyncio.Task[None]  # ends where it has joined the batch, or that worker is lost

    def close(self) -> None:
        """Nothing is held there any more. Idempotent."""
        self.joined.cancel()
        self.call.close()
        self.placement.release()


class Departure:
    """One attempt at a move. Whatever ends `run` before `arrive`, nothing is held elsewhere, and
    the answer goes on where it is.

    First a place and the room there by the router's books, while the answer runs on; then it is
    paused, and all its tokens are there; then a ticket for exactly the rows that it has.
    """

    def __init__(
        self,
        life: RequestLife,
        answer: AnswerLife,
        source: DecodeCall,
        placement: Placement,
        number: int,
        move: int,
    ) -> None:
        """`number`: the answer's in the source's call; `move`: counts its moves there."""
        self._life = life
        self._answer = answer
        self._source = source
        self._placement = placement  # of the source
        self._number = number
        self._move = move
        self._rows: list[int] | None = None  # once it is parked: the tokens whose KV there is
        # What the source says of this move; None: the answer went on by itself.
        self._words: asyncio.Queue[worker_pb2.MoveFailed | None] = asyncio.Queue()
        self._parked = asyncio.Event()
        self._paused_at_s = 0.0
        self._arrival: Arrival | None = None
        self._has_arrived = False

    # What the source says, by the one that reads its call.

    # What is of another move is nothing to this one.

    def park(self, parked: worker_pb2.Parked) -> None:
        """All its tokens are here. Raises WorkerFaultError where they are not."""
        if parked.number != self._move:
            return
        prompt, answer = self._life.spec.prompt_token_ids, self._answer.answer
        self._rows = [*prompt, *answer.token_ids[: answer.num_taken - 1]]
        if parked.num_rows != len(self._rows):
            raise WorkerFaultError(
                f"worker {self._source.view.worker_id} parked {parked.num_rows} rows of an answer "
                f"that has {len(self._rows)}"
            )
        self._parked.set()

    def fail(self, failed: worker_pb2.MoveFailed) -> None:
        """The KV did not get there; the answer stays parked."""
        if failed.number == self._move:
            self._words.put_nowait(failed)

    def hear_tokens(self) -> None:
        """One that was parked goes on: no word came for too long."""
        if self._rows is not None:
            self._words.put_nowait(None)

    def arrive(self, moved: worker_pb2.Moved) -> Arrival | None:
        """The KV is there; None where this move is over and nothing came of it."""
        arrival = self._arrival
        if arrival is None or moved.number != self._move:
            return None
        self._has_arrived = True
        view, answer = self._source.view, self._answer
        target = arrival.call.view
        view.move_s = time.monotonic() - self._paused_at_s
        self._life.pool.paths.passed((view.worker_id, target.worker_id))
        self._life.kv_moves += 1
        answer.count_move(moved)
        answer.record.moved(target.worker_id)
        log.info(
            "request %s: answer %d moved from %s to %s at token %d",
            *(self._life.spec.request_id, answer.index, view.worker_id, target.worker_id),
            answer.answer.num_taken,
        )
        return arrival

    # The move.

    async def run(self) -> None:
        """Returns where it failed; where the KV arrives it is cancelled, after `arrive`."""
        turn = _Turn(self._source.view.leaving)
        try:
            await turn.take()
            await self._move_on(turn)
        except RequestError as error:
            log.info("request %s: no place to move to: %s", self._life.spec.request_id, error)
        finally:
            turn.give_back()

    async def _move_on(self, turn: _Turn) -> None:
        placement = await self._place()
        target: DecodeCall | None = None
        try:
            await self._pause(turn)
            assert placement.decode is not None, "there is something to decode"
            life = self._life
            target = DecodeCall(placement.decode, life.seconds_left(), life.record.trace)
            ticket = await self._ticket(target, placement)
            await self._send(target, placement, ticket)
        except _MoveFailedError as error:
            log.warning("request %s: not moved: %s", self._life.spec.request_id, error)
        except AttemptEndedError as error:
            log.warning("request %s: not moved: %s", self._life.spec.request_id, error)
            self._note_target(error, placement.demand)
        finally:
            if not self._has_arrived:
                if self._arrival is not None:
                    self._arrival.joined.cancel()
                if target is not None:
                    target.close()
                placement.release()
                self._source.resume(self._number, self._move)

    async def _place(self) -> Placement:
        """A worker with room, by what the router knows; the answer runs on meanwhile."""
        answer, spec = self._answer, self._life.spec
        demand = Demand(
            prefill_tokens=len(spec.prompt_token_ids) + answer.answer.num_taken,
            decode_tokens=spec.max_kv_tokens,
            batch=spec.batch_priority,
            avoid=answer.avoid,
        )
        # The KV is the source's to send: a path from there counts, and no prefill is wanted.
        kept = replace(self._placement, prefill=self._source.view)
        return await self._life.admission.place(answer.entry, demand, first=False, keep=kept)

    async def _pause(self, turn: _Turn) -> None:
        self._source.pause(self._number, self._move)
        parked = asyncio.create_task(self._parked.wait())
        try:
            await asyncio.wait({parked}, timeout=SLOW_S)
            if not parked.done():
                turn.give_back()
                await asyncio.wait({parked}, timeout=PARK_TIMEOUT_S - SLOW_S)
                if not parked.done():
                    raise _MoveFailedError(f"it was not parked within {PARK_TIMEOUT_S:g} s")
                await turn.take()
        finally:
            parked.cancel()
        self._paused_at_s = time.monotonic()

    async def _ticket(self, target: DecodeCall, placement: Placement) -> worker_pb2.KvTicket:
        spec, answer = self._life.spec, self._answer
        self._life.tries += 1
        batch = placement.demand.batch
        reserve = worker_pb2.Reserve(
            key=worker_pb2.AttemptKey(request_id=spec.request_id, attempt=self._life.tries),
            token_ids=self._rows,
            num_prompt_tokens=len(spec.prompt_token_ids),
            sampling=spec.sampling_of(answer.index),
            eos_token_ids=spec.eos_token_ids,
            cache_salt=spec.cache_salt,
            priority=common_pb2.PRIORITY_BATCH if batch else common_pb2.PRIORITY_INTERACTIVE,
            arrival=answer.entry.arrival,
            num_preemptions=answer.num_preemptions,
            num_answers=1,
        )
        try:
            async with asyncio.timeout(TICKET_TIMEOUT_S):
                ticket = await target.reserve(reserve)
        except TimeoutError:
            raise WorkerFailedError(target.view, "it gave no ticket in time") from None
        placement.granted()
        return ticket

    async def _send(
        self, target: DecodeCall, placement: Placement, ticket: worker_pb2.KvTicket
    ) -> None:
        """Ends where it fails; where the KV arrives, `arrive` comes, and then a cancellation."""
        # The target says nothing before Start: a read there tells only of its loss.
        joined = asyncio.create_task(target.joined())
        joined.add_done_callback(_seen)
        self._arrival = Arrival(target, placement, ticket.key.attempt, joined)
        address = target.view.endpoint.address
        self._source.move(self._number, self._move, ticket, address)
        hearing = asyncio.create_task(self._words.get())
        try:
            await asyncio.wait({joined, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if not hearing.done():
                joined.result()
                raise WorkerFaultError(f"worker {target.view.worker_id} joined unasked")
            failed = hearing.result()
        finally:
            hearing.cancel()
        if failed is None:
            raise _MoveFailedError("it went on by itself")
        self._life.pool.paths.failed((self._source.view.worker_id, target.view.worker_id))
        raise _MoveFailedError(printable(failed.reason))

    def _note_target(self, error: AttemptEndedError, demand: Demand) -> None:
        """It is none of the answer's failures: nothing is lost."""
        if isinstance(error, NoRoomError):
            error.view.note_refusal(demand)
            return
        if isinstance(error, WorkerFailedError):
            self._life.pool.note_failure(error.view, self._life.spec.request_id)
        else:
            error.view.full = True
        self._answer.avoid |= {error.view.worker_id}


class _Turn:
    """One of the places among those that leave a worker at once."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places = places
        self._is_taken = False

    async def take(self) -> None:
        """Waits for it."""
        await self._places.acquire()
        self._is_taken = True

    def give_back(self) -> None:
        """Idempotent."""
        if self._is_taken:
            self._is_taken = False
            self._places.release()


def _seen(task: asyncio.Task[None]) -> None:
    """Marks the exception as looked at: whoever needs the result asks for it."""
    if not task.cancelled():
        task.exception()
