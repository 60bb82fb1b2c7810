"""PrefillCall: one Prefill call, from its Request to the end of the hand-off."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from legato.protos import worker_pb2
from legato.worker.handoff.handoff_error import HandoffError
from legato.worker.mailbox import BrokenEvent, TokenEvent
from legato.worker.services.errors import broken, invalid
from legato.worker.services.messages import first_token_message
from legato.worker.services.validation import check_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from legato.worker.handoff.sender import HandoffResult, KvSender
    from legato.worker.kv.progress import KvProgress
    from legato.worker.mailbox import Mailbox
    from legato.worker.sequence import Sequence

    Write = Callable[[worker_pb2.PrefillEvent], Awaitable[None]]

# After a hand-off has failed the blocks wait so long for a Retarget. A lost worker's lease ends
# within 5 s, and those that wait for prefill's room should not wait longer for a router that is
# silent; one that finds no other decode worker by then has the prompt computed again.
RETARGET_WAIT_S = 5.0


class PrefillCall:
    """Used on the event loop only. Whatever ends it, no hand-off of it goes on.

    The hand-off begins with the call and runs beside the computation, in a task that a Retarget
    replaces. One task serves and is the only one that writes; another listens to the router.
    """

    def __init__(
        self,
        sender: KvSender,
        sequence: Sequence,
        mailbox: Mailbox,
        request: worker_pb2.PrefillRequest,
        write: Write,
    ) -> None:
        """The sequence is in the engine, and has a progress where the request has a ticket."""
        self._sender = sender
        self._sequence = sequence
        self._mailbox = mailbox
        self._request_id = request.key.request_id
        self._write = write
        self._num_retargets = 0
        self._retargeted = asyncio.Event()
        self._handoff: asyncio.Task[HandoffResult] | None = None
        if sequence.progress is not None:
            self._begin_handoff(sequence.progress, request.ticket, request.decode_address)

    async def run(self, commands: AsyncIterator[worker_pb2.PrefillCommand]) -> None:
        """Returns when nothing more is to be said.

        Raises:
            CallError, EngineDiedError: no usable logits, a wrong command, or the worker's own end.
        """
        serving = asyncio.create_task(self._serve())
        listening = asyncio.create_task(self._listen(commands))
        try:
            await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                listening.result()  # the router has ended its side, which ends nothing here
                await asyncio.wait({serving})
            serving.result()
        finally:
            for task in (serving, listening, self._handoff):
                if task is not None:
                    task.cancel()
                    task.add_done_callback(_seen)

    # What the router says.

    async def _listen(self, commands: AsyncIterator[worker_pb2.PrefillCommand]) -> None:
        async for command in commands:
            got = command.WhichOneof("command")
            if got != "retarget":
                raise invalid(f"command is {got}, retarget is expected now")
            self._retarget(command.retarget)

    def _retarget(self, retarget: worker_pb2.Retarget) -> None:
        progress = self._sequence.progress
        if self._handoff is None or progress is None:
            raise invalid("retarget came to a call whose request has no ticket")
        if retarget.ticket.key.request_id != self._request_id:
            raise invalid("retarget.ticket.key is of another request")
        check_address("retarget.decode_address", retarget.decode_address)
        self._handoff.cancel()  # nothing to one that is over
        self._num_retargets += 1
        self._begin_handoff(progress, retarget.ticket, retarget.decode_address)
        self._retargeted.set()

    def _begin_handoff(
        self, progress: KvProgress, ticket: worker_pb2.KvTicket, address: str
    ) -> None:
        self._handoff = asyncio.create_task(self._sender.send(progress, ticket, address))
        self._handoff.add_done_callback(_seen)

    # What the router is told.

    async def _serve(self) -> None:
        tokens = await self._first_tokens()
        goes_on = any(token.finish_reason is None for token in tokens)
        if goes_on and self._sequence.progress is not None:
            self._sequence.progress.confirm()
        first_token = first_token_message(tokens, self._sequence)
        await self._write(worker_pb2.PrefillEvent(first_token=first_token))
        if goes_on and self._handoff is not None:
            await self._tell_of_handoffs()

    async def _first_tokens(self) -> list[TokenEvent]:
        """One for each answer, in order."""
        tokens: dict[int, TokenEvent] = {}
        while len(tokens) < self._sequence.num_answers:
            for event in await self._mailbox.take():
                if isinstance(event, BrokenEvent):
                    raise broken(event)
                if isinstance(event, TokenEvent):
                    tokens[event.answer] = event
        return [tokens[answer] for answer in range(self._sequence.num_answers)]

    async def _tell_of_handoffs(self) -> None:
        """To the first that is done, or the last that failed."""
        while True:
            handoff, number = self._handoff, self._num_retargets
            assert handoff is not None, "one was begun with the call"
            await asyncio.wait({handoff})
            if number != self._num_retargets:
                continue
            try:
                result = handoff.result()
            except HandoffError as error:
                await self._write(_failed(error, number))
                if not error.decode_lost or not await self._is_retargeted(number):
                    return
            else:
                await self._write(_done(result, number))
                return

    async def _is_retargeted(self, number: int) -> bool:
        """Waits for a Retarget beyond that number, for as long as the blocks are kept."""
        try:
            async with asyncio.timeout(RETARGET_WAIT_S):
                while number == self._num_retargets:
                    self._retargeted.clear()
                    await self._retargeted.wait()
        except TimeoutError:
            return False
        return True


def _failed(error: HandoffError, num_retargets: int) -> worker_pb2.PrefillEvent:
    failed = worker_pb2.HandoffFailed(
        decode_lost=error.decode_lost,
        reason=str(error),
        num_retargets=num_retargets,
        refused=error.refused,
    )
    return worker_pb2.PrefillEvent(handoff_failed=failed)


def _done(result: HandoffResult, num_retargets: int) -> worker_pb2.PrefillEvent:
    done = worker_pb2.HandoffDone(
        kv_bytes=result.kv_bytes,
        transfer_s=result.transfer_s,
        reused_tokens=result.reused_tokens,
        num_retargets=num_retargets,
    )
    return worker_pb2.PrefillEvent(handoff_done=done)


def _seen(task: asyncio.Task[HandoffResult] | asyncio.Task[None]) -> None:
    """Marks the exception as looked at: whoever needs the result asks for it."""
    if not task.cancelled():
        task.exception()
