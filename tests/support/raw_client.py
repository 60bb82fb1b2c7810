"""RawClient, BlockingRawClient: streams just as one router sends them; nothing is tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from legato.cluster.client import AsyncClient, Client
from legato.cluster.client_channels import CHANNEL_OPTIONS, Channels
from legato.protos import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

# A busy machine may keep a router from answering for seconds: for a client that does not go on
# elsewhere, that is no loss.
PATIENT = tuple(o for o in CHANNEL_OPTIONS if "keepalive" not in o[0] and "ping" not in o[0])


class RawClient(AsyncClient):
    """`generate` is one call; what the router answers is what the test sees."""

    def __init__(self, address: str | Sequence[str]) -> None:
        super().__init__(address)
        self._channels = Channels(lambda t: grpc.aio.insecure_channel(t, options=PATIENT))

    async def generate(  # type: ignore[override]  # as said
        self, request: generation_pb2.GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Deltas, then one finish, of each answer. `aclose()` on the iterator cancels the call."""
        channel = self._channels.of(self._rotation.pick())
        stub: generation_pb2_grpc.GenerationAsyncStub = generation_pb2_grpc.GenerationStub(channel)
        call = stub.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()


class BlockingRawClient(Client):
    """The same for threads."""

    def __init__(self, address: str | Sequence[str]) -> None:
        super().__init__(address)
        self._channels = Channels(lambda t: grpc.insecure_channel(t, options=PATIENT))

    def generate(  # type: ignore[override]  # as said
        self, request: generation_pb2.GenerateRequest, *, timeout_s: float | None = None
    ) -> Iterator[generation_pb2.GenerateResponse]:
        """As RawClient's; `close()` on the iterator cancels the call."""
        stub = generation_pb2_grpc.GenerationStub(self._channels.of(self._rotation.pick()))
        call = stub.Generate(request, timeout=timeout_s)
        try:
            yield from call
        finally:
            call.cancel()
