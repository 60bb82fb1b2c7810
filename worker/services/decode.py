"""DecodeService: the Decode call, which owns one attempt's ticket, blocks and sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from legato.protos import worker_pb2, worker_pb2_grpc
from legato.worker.handoff.tickets import NeverFitsError, NoRoomNowError, TicketState
from legato.worker.lifecycle import NotReadyError
from legato.worker.mailbox import BrokenEvent, JoinedEvent, TokenEvent
from legato.worker.sequence import Sequence
from legato.worker.services.call_limit import limited
from legato.worker.services.errors import (
    CallError,
    invalid,
    no_usable_logits,
    reports_errors,
    wrong_role,
)
from legato.worker.services.messages import finish_reason, sampled_token
from legato.worker.services.validation import (
    check_lengths,
    check_token_ids,
    read_key,
    read_sampling,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from legato.worker.engine import Engine
    from legato.worker.handoff.tickets import Ticket, TicketBook
    from legato.worker.identity import Identity
    from legato.worker.lifecycle import Lifecycle
    from legato.worker.mailbox import Mailbox

    Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(worker_pb2_grpc.DecodeWorkerServicer):
    """See PrefillService for why handlers write instead of yielding."""

    def __init__(
        self, identity: Identity, lifecycle: Lifecycle, engine: Engine, tickets: TicketBook
    ) -> None:
        self._identity = identity
        self._lifecycle = lifecycle
        self._engine = engine
        self._tickets = tickets

    @reports_errors
    async def Decode(  # type: ignore[override]  # noqa: N802  # the stub knows generators only; the name is the RPC's
        self, request_iterator: AsyncIterator[worker_pb2.DecodeCommand], context: Context
    ) -> None:
        """Reserve → ticket; Start and the KV → Joined; then Tokens up to the finish."""
        if self._identity.role != "decode":
            raise wrong_role("Decode", self._identity.role)
        command = await _next_command(request_iterator, "reserve")
        try:
            with self._lifecycle.work():
                ticket = self._reserve(command.reserve)
                try:
                    async with limited(context):
                        await self._serve(request_iterator, context, ticket)
                finally:
                    self._tickets.close(ticket)
        except NotReadyError as error:
            raise CallError(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None

    def _reserve(self, reserve: worker_pb2.Reserve) -> Ticket:
        key = read_key(reserve.key)
        rows, limit = reserve.max_kv_tokens, self._identity.context_length
        if not 1 <= rows <= limit:
            raise invalid(f"max_kv_tokens is {rows}, limit [1, {limit}] (the context)")
        if not 1 <= reserve.num_handoff_tokens <= rows:
            raise invalid(
                f"num_handoff_tokens is {reserve.num_handoff_tokens}, "
                f"limit [1, max_kv_tokens {rows}]"
            )
        try:
            return self._tickets.reserve(key, reserve.num_handoff_tokens, rows)
        except NoRoomNowError as error:
            raise CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None
        except NeverFitsError as error:
            raise CallError(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None

    async def _serve(
        self,
        commands: AsyncIterator[worker_pb2.DecodeCommand],
        context: Context,
        ticket: Ticket,
    ) -> None:
        granted = worker_pb2.KvTicket(
            key=worker_pb2.AttemptKey(request_id=ticket.key.request_id, attempt=ticket.key.attempt),
            epoch=ticket.epoch,
            worker_id=self._identity.worker_id,
            blocks=ticket.num_blocks,
        )
        await context.write(worker_pb2.DecodeEvent(ticket=granted))
        start = (await _next_command(commands, "start")).start
        sequence = self._read(start, ticket)
        await ticket.settled.wait()
        if ticket.state is not TicketState.LANDED:
            raise CallError(grpc.StatusCode.UNAVAILABLE, "the worker ended before the KV landed")
        sequence.lease = self._tickets.hand_over(ticket)
        mailbox = self._engine.submit(sequence)
        try:
            await _stream(mailbox, context)
        finally:
            self._engine.release(sequence, mailbox)

    def _read(self, start: worker_pb2.Start, ticket: Ticket) -> Sequence:
        vocab_size = self._identity.model.vocab_size
        params = read_sampling(start.sampling, vocab_size)
        num_tokens = len(start.token_ids)
        check_lengths(
            num_tokens, start.num_prompt_tokens, params.max_tokens, self._identity.context_length
        )
        if num_tokens != ticket.num_handoff_tokens + 1:
            raise invalid(
                f"token_ids has {num_tokens} ids; the hand-off of {ticket.num_handoff_tokens} "
                f"rows needs one more than these"
            )
        rows = start.num_prompt_tokens + params.max_tokens - 1
        if rows > ticket.max_kv_tokens:
            raise invalid(
                f"num_prompt_tokens {start.num_prompt_tokens} + sampling.max_tokens "
                f"{params.max_tokens} - 1 exceed the ticket's max_kv_tokens {ticket.max_kv_tokens}"
            )
        check_token_ids("token_ids", start.token_ids, vocab_size)
        check_token_ids("eos_token_ids", start.eos_token_ids, vocab_size)
        return Sequence(
            token_ids=list(start.token_ids),
            num_prompt_tokens=start.num_prompt_tokens,
            params=params,
            eos_token_ids=frozenset(start.eos_token_ids),
            num_computed=ticket.num_handoff_tokens,
        )


async def _next_command(
    commands: AsyncIterator[worker_pb2.DecodeCommand], wanted: str
) -> worker_pb2.DecodeCommand:
    async for command in commands:
        got = command.WhichOneof("command")
        if got != wanted:
            raise invalid(f"command is {got}, {wanted} is expected now")
        return command
    raise invalid(f"the stream ended before {wanted}")


async def _stream(mailbox: Mailbox, context: Context) -> None:
    """Passes events on until the finish; tokens that wait for a slow reader share a message."""
    while True:
        tokens: list[TokenEvent] = []
        broken: BrokenEvent | None = None
        for event in await mailbox.take():
            if isinstance(event, JoinedEvent):
                await context.write(worker_pb2.DecodeEvent(joined=worker_pb2.Joined()))
            elif isinstance(event, BrokenEvent):
                broken = event
            else:
                tokens.append(event)
        if tokens:
            await _write(tokens, context)
        if broken is not None:
            raise no_usable_logits(broken)
        if tokens and tokens[-1].finish_reason is not None:
            return


async def _write(tokens: list[TokenEvent], context: Context) -> None:
    last = tokens[-1]
    await context.write(
        worker_pb2.DecodeEvent(
            tokens=worker_pb2.Tokens(
                tokens=[sampled_token(t) for t in tokens],
                finished=last.finish_reason is not None,
                finish_reason=finish_reason(last),
                decode_forwards=last.num_forwards,
                model_s=last.model_s,
            )
        )
    )
