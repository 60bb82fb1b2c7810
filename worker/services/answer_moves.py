"""AnswerMoves: the answers of one Decode call on their way to another decode worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.protos import worker_pb2
from legato.worker.call_trace import NOT_TRACED
from legato.worker.handoff.handoff_error import HandoffError
from legato.worker.kv.progress import KvProgress
from legato.worker.services.errors import invalid
from legato.worker.services.validation import check_address, check_ticket

if TYPE_CHECKING:
    from legato.worker.call_trace import CallTrace
    from legato.worker.engine import Engine
    from legato.worker.handoff.sender import HandoffResult, KvSender
    from legato.worker.mailbox import ParkedEvent
    from legato.worker.sequence import Sequence

# A parked answer whose router says nothing goes on here: that it is parked comes behind its tokens,
# which a slow client may hold up.
PARKED_FOR_S = 20.0


@dataclass(eq=False)
class _Move:
    """One answer's, from Pause to its end."""

    number: int
    sequence: Sequence
    num_rows: int | None = None  # once it is parked
    sending: asyncio.Task[HandoffResult] | None = None
    silence: asyncio.TimerHandle | None = None  # where nothing is sent


class AnswerMoves:
    """Used on the event loop only. `drop` each answer that leaves the engine.

    The sequence is parked in the engine from the ParkedEvent on, and nothing of it changes until it
    resumes or leaves: its rows can be sent like those of a prompt.
    """

    def __init__(
        self,
        engine: Engine,
        sender: KvSender,
        request_id: str,
        num_layers: int,
        *,
        trace: CallTrace = NOT_TRACED,
    ) -> None:
        self._trace = trace
        self._engine = engine
        self._sender = sender
        self._request_id = request_id
        self._num_layers = num_layers
        self._moves: dict[int, _Move] = {}  # by answer

    def pause(self, pause: worker_pb2.Pause, sequence: Sequence) -> None:
        """The answer is to be parked; an earlier move of it is over."""
        self.drop(pause.answer)
        self._moves[pause.answer] = _Move(pause.number, sequence)
        self._engine.park(sequence, pause.number)

    def parked(self, answer: int, event: ParkedEvent) -> worker_pb2.Parked | None:
        """The engine says so; None where the move is over."""
        move = self._moves.get(answer)
        if move is None or move.number != event.number:
            return None
        move.num_rows = event.num_rows
        self._await_word(answer, move)
        return worker_pb2.Parked(answer=answer, number=move.number, num_rows=event.num_rows)

    def resume(self, resume: worker_pb2.Unpark) -> None:
        """The answer goes on here; nothing where that move is over."""
        move = self._moves.get(resume.answer)
        if move is not None and move.number == resume.number:
            self.drop(resume.answer)
            self._engine.resume(move.sequence)

    def drop(self, answer: int) -> None:
        """Its move is over, if there is one: nothing more is sent. Idempotent."""
        move = self._moves.pop(answer, None)
        if move is not None:
            if move.sending is not None:
                move.sending.cancel()
            if move.silence is not None:
                move.silence.cancel()

    def close(self) -> None:
        """All are over."""
        for answer in list(self._moves):
            self.drop(answer)

    async def carry(
        self, command: worker_pb2.Move
    ) -> worker_pb2.Moved | worker_pb2.MoveFailed | None:
        """Sends the rows. After Moved the caller takes the answer out of the engine, at once; None:
        the move is over meanwhile, and what has landed is void by the router's word.

        Raises:
            CallError: the ticket is another request's.
        """
        answer, number, ticket = command.answer, command.number, command.ticket
        if ticket.key.request_id != self._request_id:
            raise invalid("move.ticket.key is of another request")
        check_ticket("move.ticket", ticket)
        check_address("move.decode_address", command.decode_address)
        move = self._moves.get(answer)
        failed = worker_pb2.MoveFailed(answer=answer, number=number)
        if move is None or move.number != number or move.num_rows is None:
            failed.reason = "the answer is not parked"
            return failed
        if move.sending is not None:
            raise invalid(f"move {number} of answer {answer} is under way already")
        if move.silence is not None:
            move.silence.cancel()
        lease = move.sequence.lease
        assert lease is not None, "parked without blocks"
        progress = KvProgress.complete(lease, self._num_layers, move.num_rows)
        move.sending = asyncio.create_task(
            self._sender.send(progress, ticket, command.decode_address)
        )
        move.sending.add_done_callback(_seen)
        part = self._trace.part(
            "kv send", decode_address=command.decode_address, worker=ticket.worker_id
        )
        try:
            await asyncio.wait({move.sending})
        finally:
            move.sending.cancel()  # where this call ends
        if self._moves.get(answer) is not move:
            part.end("the move is over")
            return None
        try:
            result = move.sending.result()
        except HandoffError as error:
            move.sending = None
            self._await_word(answer, move)
            failed.reason, failed.refused = str(error), error.refused
            part.end(failed.reason)
            return failed
        part.end(kv_bytes=result.kv_bytes, reused_tokens=result.reused_tokens)
        return worker_pb2.Moved(
            answer=answer,
            number=number,
            kv_bytes=result.kv_bytes,
            transfer_s=result.transfer_s,
            reused_tokens=result.reused_tokens,
        )

    def _await_word(self, answer: int, move: _Move) -> None:
        resume = worker_pb2.Unpark(answer=answer, number=move.number)
        move.silence = asyncio.get_running_loop().call_later(PARKED_FOR_S, self.resume, resume)


def _seen(task: asyncio.Task[HandoffResult]) -> None:
    """Marks the exception as looked at: whoever needs the result asks for it."""
    if not task.cancelled():
        task.exception()
