"""DecodeService: the Decode call, which owns one attempt's ticket, blocks and sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from legato.protos import worker_pb2, worker_pb2_grpc
from legato.worker.call_trace import begin_call
from legato.worker.lifecycle import NotReadyError
from legato.worker.scheduling.claim import NeverFitsError, NoRoomNowError
from legato.worker.services.answer_moves import AnswerMoves
from legato.worker.services.call_limit import limited
from legato.worker.services.decode_call import DecodeCall
from legato.worker.services.decode_request import DecodeRequest
from legato.worker.services.errors import CallError, invalid, reports_errors, wrong_role
from legato.worker.services.validation import read_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from legato.protos.tracing import Tracing
    from legato.worker.call_trace import CallTrace
    from legato.worker.engine import Engine
    from legato.worker.handoff.sender import KvSender
    from legato.worker.handoff.tickets import AttemptKey, Ticket, TicketBook
    from legato.worker.identity import Identity
    from legato.worker.lifecycle import Lifecycle

    Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(worker_pb2_grpc.DecodeWorkerServicer):
    """See PrefillService for why handlers write instead of yielding."""

    def __init__(
        self,
        identity: Identity,
        lifecycle: Lifecycle,
        engine: Engine,
        tickets: TicketBook,
        sender: KvSender,
        *,
        prefix_cache: bool,
        tracing: Tracing | None = None,
    ) -> None:
        self._identity = identity
        self._lifecycle = lifecycle
        self._engine = engine
        self._tickets = tickets
        self._sender = sender
        self._prefix_cache = prefix_cache
        self._tracing = tracing

    @reports_errors
    async def Decode(  # type: ignore[override]  # noqa: N802  # the stub knows generators only; the name is the RPC's
        self, request_iterator: AsyncIterator[worker_pb2.DecodeCommand], context: Context
    ) -> None:
        """Reserve → ticket; Start and the KV (or with local prefill FirstToken) → Joined; then each
        answer's Tokens up to its end.
        """
        if self._identity.role == "prefill":
            raise wrong_role("Decode", self._identity.role)
        reserve = (await _next_command(request_iterator, "reserve")).reserve
        key = read_key(reserve.key)
        request = DecodeRequest.read(reserve, self._identity, prefix_cache=self._prefix_cache)
        trace = begin_call(self._tracing, "decode", context, reserve.key)
        try:
            with self._lifecycle.work():
                ticket = self._reserve(key, request)
                try:
                    async with limited(context):
                        await self._serve(request_iterator, context, request, ticket, trace)
                finally:
                    self._tickets.close(ticket)
        except NotReadyError as error:
            raise CallError(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None
        finally:
            trace.end()

    def _reserve(self, key: AttemptKey, request: DecodeRequest) -> Ticket:
        try:
            return self._tickets.reserve(key, request.ticket)
        except NoRoomNowError as error:
            raise CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None
        except NeverFitsError as error:
            raise CallError(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None

    async def _serve(
        self,
        commands: AsyncIterator[worker_pb2.DecodeCommand],
        context: Context,
        request: DecodeRequest,
        ticket: Ticket,
        trace: CallTrace,
    ) -> None:
        granted = worker_pb2.KvTicket(
            key=worker_pb2.AttemptKey(request_id=ticket.key.request_id, attempt=ticket.key.attempt),
            epoch=ticket.epoch,
            worker_id=self._identity.worker_id,
            blocks=ticket.num_blocks,
            cached_tokens=self._tickets.count_cached_tokens(ticket),
        )
        await context.write(worker_pb2.DecodeEvent(ticket=granted))
        trace.note("ticket", blocks=granted.blocks, cached_tokens=granted.cached_tokens)
        start = (await _next_command(commands, "start")).start
        sequences = request.sequences(start)
        num_layers = self._identity.kv_shape.num_layers
        call = DecodeCall(
            self._engine,
            self._tickets,
            AnswerMoves(self._engine, self._sender, ticket.key.request_id, num_layers, trace=trace),
            ticket,
            sequences,
            context.write,
            prefills=start.local_prefill,
            trace=trace,
        )
        await call.run(commands)


async def _next_command(
    commands: AsyncIterator[worker_pb2.DecodeCommand], wanted: str
) -> worker_pb2.DecodeCommand:
    async for command in commands:
        got = command.WhichOneof("command")
        if got != wanted:
            raise invalid(f"command is {got}, {wanted} is expected now")
        return command
    raise invalid(f"the stream ended before {wanted}")
