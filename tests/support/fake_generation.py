"""FakeGeneration: the service of a router, without one: for load generators."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc

from legato.protos import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class FakeGeneration(generation_pb2_grpc.GenerationServicer):
    """Answers; knows how many calls ran at once. All but the greeting wait while it is stalled."""

    def __init__(self, stalled_s: float = 0.0, token_s: float = 0.01) -> None:
        self.num_calls = self.running = self.most = 0
        self._stalled_s, self._token_s = stalled_s, token_s
        self._free_s = 0.0

    async def GetModel(  # type: ignore[override]  # noqa: N802  # aio's form, gRPC's spelling
        self, request: generation_pb2.GetModelRequest, context: object
    ) -> generation_pb2.GetModelResponse:
        return generation_pb2.GetModelResponse(vocab_size=1000, context_length=100)

    async def Generate(  # type: ignore[override]  # noqa: N802  # aio's form, gRPC's spelling
        self, request: generation_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.num_calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        now_s = asyncio.get_running_loop().time()
        if self.num_calls > 1:
            self._free_s = self._free_s or now_s + self._stalled_s
        await asyncio.sleep(max(0.0, self._free_s - now_s))
        for index in range(request.sampling.max_tokens):
            await asyncio.sleep(self._token_s)
            delta = generation_pb2.Delta(token_ids=[index], token_offset=index)
            yield generation_pb2.GenerateResponse(delta=delta)
        self.running -= 1
        usage = generation_pb2.Usage(completion_tokens=request.sampling.max_tokens)
        yield generation_pb2.GenerateResponse(finish=generation_pb2.Finish(usage=usage))


@asynccontextmanager
async def serving(service: FakeGeneration) -> AsyncIterator[str]:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
