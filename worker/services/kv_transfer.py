"""KvTransferService: the Link call, over which KV arrives."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from legato.protos import kv_transfer_pb2
from legato.worker.handoff.incoming import RefusedError
from legato.worker.handoff.link_session import (
    BadFrameError,
    LinkSession,
    LostFrameError,
    SilenceError,
)
from legato.worker.services.errors import CallError, reports_errors, wrong_role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from legato.worker.config import Role
    from legato.worker.handoff.receiver import KvReceiver

    Context = grpc.aio.ServicerContext[Any, Any]

_CODES = {
    RefusedError: grpc.StatusCode.FAILED_PRECONDITION,
    BadFrameError: grpc.StatusCode.INVALID_ARGUMENT,
    LostFrameError: grpc.StatusCode.DATA_LOSS,
    SilenceError: grpc.StatusCode.UNAVAILABLE,
}


class KvTransferService:
    """A draining worker still receives: its open tickets are running work."""

    def __init__(self, role: Role, receiver: KvReceiver, *, shared_memory: bool) -> None:
        self._role = role
        self._receiver = receiver
        self._shared_memory = shared_memory
        self._streams: set[asyncio.Task[Any]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers it. Frames come as bytes: rows do not pass through protobuf's library."""
        service = kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name
        handler: grpc.RpcMethodHandler[bytes, kv_transfer_pb2.KvAnswer]
        handler = grpc.stream_stream_rpc_method_handler(
            self.Link,
            request_deserializer=None,
            response_serializer=kv_transfer_pb2.KvAnswer.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"Link": handler}),)
        )

    async def ended(self) -> None:
        """Returns when no stream is left. gRPC, which cuts them off as its server stops, waits for
        none: each has rows in hand to see to, and then its sender's memory to give back.
        """
        if self._streams:
            await asyncio.wait(self._streams)

    @reports_errors
    async def Link(  # noqa: N802  # the name is the RPC's
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> None:
        """Answers every frame until the sender ends the stream."""
        if self._role == "prefill":
            raise wrong_role("Link", self._role)
        stream = asyncio.current_task()
        assert stream is not None
        self._streams.add(stream)
        stream.add_done_callback(self._streams.discard)
        session = LinkSession(
            self._receiver,
            aiter(request_iterator),
            context.write,
            shared_memory=self._shared_memory,
        )
        try:
            await session.run()
        except (RefusedError, BadFrameError, LostFrameError, SilenceError) as error:
            raise CallError(_CODES[type(error)], str(error)[:1000]) from None
