"""TwoWorkers: a prefill worker in this process, a decode worker in another, and what is between."""

from __future__ import annotations

import json
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import torch

from legato.bench.handoff.bare_grpc import SERVICE
from legato.bench.handoff.kv_model import CONTEXT_LENGTH, VOCAB_SIZE, loaded_model, worker_config
from legato.bench.ready_process import ready_process
from legato.protos import common_pb2, worker_pb2, worker_pb2_grpc
from legato.worker.channel import CHANNEL_OPTIONS
from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import blocks_for
from legato.worker.server import WorkerServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from legato.worker.node import WorkerNode

_TIMEOUT_S = 120.0
_SAMPLING = common_pb2.SamplingParams(
    max_tokens=2,
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=0,
    ignore_eos=True,
    min_tokens=0,
)


class TwoWorkers:
    """Both are whole workers with real pools; this process plays the router as well."""

    def __init__(
        self,
        node: WorkerNode,
        decode_address: str,
        limits_address: str,
        decode: grpc.aio.Channel,
        limits: grpc.aio.Channel,
    ) -> None:
        """See `running`."""
        self.node = node
        self.decode_address = decode_address
        self.limits_address = limits_address
        self._decode: worker_pb2_grpc.DecodeWorkerAsyncStub = worker_pb2_grpc.DecodeWorkerStub(
            decode
        )
        self._limits = limits
        self._num_tickets = 0

    @classmethod
    @asynccontextmanager
    async def running(cls, dtype: str, num_tokens: int) -> AsyncIterator[TwoWorkers]:
        """Two pools with room for `num_tokens` rows each."""
        shape = loaded_model(dtype).model.config
        row_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        memory_bytes = (num_tokens + 64) * row_bytes * loaded_model(dtype).dtype.itemsize
        arguments = ("--dtype", dtype, "--kv-memory", str(memory_bytes))
        async with ready_process("legato.bench.handoff.receiving", *arguments) as ready:
            server = WorkerServer(
                worker_config("prefill", dtype, memory_bytes), loaded_model(dtype)
            )
            channels: list[grpc.aio.Channel] = []
            try:
                await server.start()
                channels += [
                    grpc.aio.insecure_channel(ready[name], options=CHANNEL_OPTIONS)
                    for name in ("address", "limits")
                ]
                yield cls(server.node, ready["address"], ready["limits"], *channels)
            finally:
                for channel in channels:
                    await channel.close()
                await server.stop(0)

    def rows(self, num_tokens: int, seed: int = 0) -> BlockLease:
        """Blocks of the prefill worker, with random rows in them."""
        cache, shape = self.node.cache, self.node.cache.shape
        blocks = self.node.pool.allocate(blocks_for(num_tokens, shape.block_size))
        assert blocks is not None, "the pool was made for less"
        random = torch.Generator().manual_seed(seed)
        offsets = torch.arange(shape.block_size)
        slots = (torch.tensor(blocks)[:, None] * shape.block_size + offsets).flatten()
        size = (len(slots), shape.num_kv_heads, shape.head_dim)
        for layer in cache.layers:
            for pages in (layer.k, layer.v):
                pages[slots] = torch.randn(size, generator=random).to(shape.dtype)
        return BlockLease(self.node.pool, blocks)

    @asynccontextmanager
    async def ticket(self, num_tokens: int) -> AsyncIterator[worker_pb2.KvTicket]:
        """As the router takes it; given back at the end, with what has landed.

        Raises:
            RuntimeError: there is none, for the reason given.
        """
        assert num_tokens < CONTEXT_LENGTH
        self._num_tickets += 1
        reserve = worker_pb2.Reserve(
            key=worker_pb2.AttemptKey(request_id=f"bench-{self._num_tickets}"),
            token_ids=[i % VOCAB_SIZE for i in range(num_tokens)],
            num_prompt_tokens=num_tokens,
            sampling=_SAMPLING,
            num_answers=1,
        )
        call: Any = self._decode.Decode(timeout=_TIMEOUT_S)
        try:
            await call.write(worker_pb2.DecodeCommand(reserve=reserve))
            event = await call.read()
            if event is grpc.aio.EOF:
                raise RuntimeError(f"no ticket: {await call.code()} {await call.details()}")
            yield event.ticket
        finally:
            call.cancel()

    async def ask(self, method: str, **asked: object) -> dict[str, Any]:
        """A request to the receiving process: see `receiving.Requests`."""
        unary: Any = self._limits.unary_unary(f"/{SERVICE}/{method}")
        answer = json.loads(await unary(json.dumps(asked).encode(), timeout=_TIMEOUT_S))
        assert isinstance(answer, dict)
        return answer


def memory_path(file: int) -> str:
    """Of this process's descriptor, for the other one."""
    return f"/proc/{os.getpid()}/fd/{file}"
