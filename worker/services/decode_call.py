"""DecodeCall: the answers of one Decode call, from Start to the end of the last of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from legato.protos import worker_pb2
from legato.protos.kv_lapsed import KV_LAPSED
from legato.worker.handoff.tickets import TicketState
from legato.worker.mailbox import (
    BrokenEvent,
    JoinedEvent,
    ParkedEvent,
    PreemptedEvent,
    TokenEvent,
)
from legato.worker.services.errors import CallError, broken, invalid
from legato.worker.services.messages import first_token_message, tokens_message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
    from collections.abc import Sequence as SequenceOf
    from typing import Any

    from legato.worker.engine import Engine
    from legato.worker.handoff.tickets import Ticket, TicketBook
    from legato.worker.mailbox import EngineEvent, Mailbox
    from legato.worker.sequence import Sequence
    from legato.worker.services.answer_moves import AnswerMoves

    Write = Callable[[worker_pb2.DecodeEvent], Awaitable[None]]

# A call of several answers stays open so long for a `Stop` that is on its way when the last one
# ends: who writes to a call that is over, gRPC keeps from reading what came before its end. The
# router ends the call as soon as it has read that, so the time is hardly ever used up.
LAST_STOP_S = 1.0
# What waits for a slow reader is any number of tokens, and gRPC takes messages of 4 MiB: a token
# with all its logprobs is below 400 bytes, here and in what the router makes of it.
MAX_TOKENS_A_MESSAGE = 1024


@dataclass(eq=False)
class _Stream:
    """One answer in the engine."""

    sequence: Sequence
    mailbox: Mailbox
    stopped: bool = False  # the router wants no more of it


class DecodeCall:
    """Used on the event loop only. Whatever ends it, the engine is rid of every answer.

    An answer is in one of three places: it waits for the KV to land (and the ticket has a claim
    for it), it is in the engine (from the beginning where the worker prefills), or it has ended. A
    task for each answer passes its events on, and one listens to the router. gRPC takes one message
    at a time, and none may be broken off, so a task that is writing is not cancelled while the call
    goes on.
    """

    def __init__(
        self,
        engine: Engine,
        tickets: TicketBook,
        moves: AnswerMoves,
        ticket: Ticket,
        sequences: dict[int, Sequence],
        write: Write,
        *,
        prefills: bool = False,
    ) -> None:
        """`sequences`: of the answers that go on, by their number; none has claim or lease yet.
        `prefills`: no KV comes; there is one answer, whose first token is still to be sampled.
        """
        self._engine = engine
        self._tickets = tickets
        self._moves = moves
        self._ticket = ticket
        self._write = write
        self._num_answers = ticket.request.newcomer.num_answers
        self._landing = dict(sequences)
        self._streams: dict[int, _Stream] = {}
        self._open = set(sequences)  # not all was said of these
        self._tasks: list[asyncio.Task[None]] = []
        self._turn = asyncio.Lock()  # to write
        self._joined = False
        self._prefills = prefills
        self._first: TokenEvent | None = None  # with `prefills`
        self._failure: Exception | None = None
        self._over = asyncio.Event()
        for _ in range(self._num_answers - len(sequences)):  # prefill gave their last token
            tickets.end_answer(ticket)

    async def run(self, commands: AsyncIterator[worker_pb2.DecodeCommand]) -> None:
        """Returns when no answer is left.

        Raises:
            CallError, EngineDiedError: of the first answer that failed, or of a wrong command.
        """
        if self._prefills:
            self._begin_prefill()
        listener = self._spawn(self._listen(commands))
        try:
            if not self._prefills:
                await self._ticket.settled.wait()
                if not self._over.is_set():
                    self._enter_engine()
            await self._over.wait()
            async with self._turn:  # what is being written goes before the status
                if self._failure is not None:
                    raise self._failure
            if self._num_answers > 1:
                await asyncio.wait({listener}, timeout=LAST_STOP_S)
        finally:
            for task in self._tasks:
                task.cancel()
            self._moves.close()
            for answer in list(self._streams):
                self._leave_engine(answer)

    def _begin_prefill(self) -> None:
        """Nothing of the prompt but what is cached has its KV here."""
        if self._ticket.state is TicketState.CLOSED:
            raise CallError(grpc.StatusCode.UNAVAILABLE, "the worker ended before the prefill")
        if self._ticket.state is not TicketState.RESERVED or self._ticket.lease is not None:
            raise CallError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"local_prefill: a transfer has begun, the ticket is {self._ticket.state.name}",
            )
        [(answer, sequence)] = self._landing.items()
        place = self._tickets.prefill_here(self._ticket)
        sequence.claim, sequence.lease = place.claim, place.lease
        sequence.num_cached = sequence.num_computed = self._ticket.num_reused_tokens
        self._landing.clear()
        stream = self._streams[answer] = _Stream(sequence, self._engine.submit(sequence))
        self._spawn(self._pass_on(answer, stream))

    def _enter_engine(self) -> None:
        """All in one go: while one answer steps on, another's rows must not be gone."""
        if self._ticket.state is not TicketState.LANDED:
            assert self._ticket.closed_because is not None, "this call has closed it"
            raise CallError(
                grpc.StatusCode.UNAVAILABLE, self._ticket.closed_because, trailer=KV_LAPSED
            )
        landed = self._tickets.hand_over(self._ticket)
        for number, (answer, sequence) in enumerate(self._landing.items()):
            place = landed[number]
            sequence.claim, sequence.lease = place.claim, place.lease
            mailbox = (
                self._engine.submit(sequence)
                if number == 0
                else self._engine.fork(sequence, place.source)
            )
            self._streams[answer] = _Stream(sequence, mailbox)
        self._landing.clear()
        for answer, stream in self._streams.items():
            self._spawn(self._pass_on(answer, stream))

    def _leave_engine(self, answer: int, *, stopped: bool = False) -> None:
        stream = self._streams.pop(answer)
        stream.stopped = stopped
        self._moves.drop(answer)
        self._engine.release(stream.sequence, stream.mailbox, stopped=stopped)

    # What the router says.

    async def _listen(self, commands: AsyncIterator[worker_pb2.DecodeCommand]) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "stop":
                    self._stop(command.stop.answer)
                case "pause":
                    self._pause(command.pause)
                case "move":
                    self._spawn(self._move(command.move))
                case "unpark":
                    self._moves.resume(command.unpark)
                case got:
                    raise invalid(f"command is {got}, stop, pause, move or unpark is expected now")

    def _stop(self, answer: int) -> None:
        """Nothing where it has ended: the router cannot know yet."""
        if not 0 <= answer < self._num_answers:
            raise invalid(f"stop.answer is {answer}, limit [0, {self._num_answers})")
        if self._landing.pop(answer, None) is not None:
            if self._landing:
                self._tickets.end_answer(self._ticket)
        elif answer in self._streams:
            self._leave_engine(answer, stopped=True)
        else:
            return
        self._end(answer)

    def _pause(self, pause: worker_pb2.Pause) -> None:
        """Nothing where it has ended: the router cannot know yet."""
        if not 0 <= pause.answer < self._num_answers:
            raise invalid(f"pause.answer is {pause.answer}, limit [0, {self._num_answers})")
        if not self._joined:
            raise invalid("pause came before joined")
        if pause.answer in self._streams:
            self._moves.pause(pause, self._streams[pause.answer].sequence)

    async def _move(self, move: worker_pb2.Move) -> None:
        outcome = await self._moves.carry(move)
        if outcome is None:
            return
        if isinstance(outcome, worker_pb2.MoveFailed):
            async with self._turn:
                await self._write(worker_pb2.DecodeEvent(move_failed=outcome))
            return
        self._leave_engine(move.answer)
        async with self._turn:
            await self._write(worker_pb2.DecodeEvent(moved=outcome))
        self._end(move.answer)

    # What the engine says.

    async def _pass_on(self, answer: int, stream: _Stream) -> None:
        """Events up to the answer's end; tokens that wait for a slow reader share a message."""
        while True:
            events = await stream.mailbox.take()
            if stream.stopped:
                return
            last = events[-1]
            ends = isinstance(last, PreemptedEvent | BrokenEvent) or (
                isinstance(last, TokenEvent) and last.finish_reason is not None
            )
            if ends:
                self._leave_engine(answer)  # its blocks do not wait for a slow reader
            async with self._turn:
                for message in self._messages(answer, stream, events):
                    if stream.stopped:
                        return
                    await self._write(message)
            if isinstance(last, BrokenEvent):
                raise broken(last)
            if isinstance(last, PreemptedEvent) and self._awaits_first:
                # Nothing came of it that another attempt could go on from.
                raise CallError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "the prompt had to leave for want of KV blocks before its first token",
                )
            if ends:
                self._end(answer)
                return

    @property
    def _awaits_first(self) -> bool:
        return self._prefills and self._first is None

    def _messages(
        self, answer: int, stream: _Stream, events: SequenceOf[EngineEvent]
    ) -> Iterator[worker_pb2.DecodeEvent]:
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        last = events[-1]
        joins = isinstance(events[0], JoinedEvent | PreemptedEvent)
        if self._awaits_first:
            if not tokens:
                return
            self._first = first = tokens.pop(0)
            message = first_token_message([first], stream.sequence)
            yield worker_pb2.DecodeEvent(first_token=message)
            joins = first.finish_reason is None
        # Before all else, as the protocol says: also where one leaves that was in no batch yet.
        if not self._joined and joins:
            self._joined = True
            yield worker_pb2.DecodeEvent(joined=worker_pb2.Joined())
        for start in range(0, len(tokens), MAX_TOKENS_A_MESSAGE):
            part = tokens[start : start + MAX_TOKENS_A_MESSAGE]
            yield worker_pb2.DecodeEvent(tokens=tokens_message(answer, part, self._first))
        if isinstance(last, PreemptedEvent):
            preempted = worker_pb2.Preempted(answer=answer, num_preemptions=last.num_preemptions)
            yield worker_pb2.DecodeEvent(preempted=preempted)
        elif isinstance(last, ParkedEvent):  # one that others follow has been resumed since
            parked = self._moves.parked(answer, last)
            if parked is not None:
                yield worker_pb2.DecodeEvent(parked=parked)

    # How it ends.

    def _end(self, answer: int) -> None:
        self._open.discard(answer)
        if not self._open:
            self._finish()

    def _finish(self) -> None:
        self._over.set()
        self._tickets.close(self._ticket)  # where the KV has not landed, nobody waits for it now

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._reporting(work))
        self._tasks.append(task)
        return task

    async def _reporting(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # `run` raises it
            if self._failure is None:
                self._failure = error
            self._finish()
