"""Load: streams at one of three ends of the data path, and when each token arrived."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from legato.bench.router_overhead.http_arrivals import http_arrivals
from legato.bench.router_overhead.stream_name import StreamName
from legato.cluster.client_access import NOTHING_SHOWN, ClientAccess
from legato.protos import common_pb2, generation_pb2, generation_pb2_grpc, worker_pb2
from legato.protos.worker_pb2_grpc import DecodeWorkerStub
from legato.worker.channel import CHANNEL_OPTIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc
    import numpy.typing as npt

LoadKind = Literal["decode", "generate", "http"]
NUM_CHANNELS = 4  # clients share connections, but not all of them one
TIMEOUT_S = 120.0
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Pace:
    """`period_s` 0: each stream as fast as it goes. `together`: all streams' tokens leave at once,
    as those of one decode step; else evenly spread over the period.
    """

    period_s: float
    together: bool = False


class LoadRun:
    """`num_streams` streams of `num_tokens` each over the channels to one address."""

    def __init__(
        self,
        address: str,
        num_streams: int,
        num_tokens: int,
        kind: LoadKind = "generate",
        *,
        access: ClientAccess = NOTHING_SHOWN,
    ) -> None:
        """`decode`: the address is the decode worker's own; `http`: the HTTP endpoint's."""
        self._address = address
        self._channels = [
            access.aio_channel(address, CHANNEL_OPTIONS)
            for _ in range(0 if kind == "http" else NUM_CHANNELS)
        ]
        self._num_streams = num_streams
        self._sampling = common_pb2.SamplingParams(
            max_tokens=num_tokens, temperature=0.0, seed=0, ignore_eos=True
        )
        self._kind = kind

    async def close(self) -> None:
        """Ends the connections."""
        for channel in self._channels:
            await channel.close()

    async def arrivals_s(self, run: int, pace: Pace) -> npt.NDArray[np.float64]:
        """[streams, tokens] seconds of the monotonic clock; token 0, which is prefill's, is NaN.

        Raises:
            RuntimeError: a token was lost, doubled or out of order.
        """
        shape = (self._num_streams, self._sampling.max_tokens)
        arrivals_s = np.full(shape, np.nan)
        await asyncio.gather(
            *(self._stream(run, number, pace, arrivals_s[number]) for number in range(shape[0]))
        )
        return arrivals_s

    async def _stream(
        self, run: int, number: int, pace: Pace, arrivals_s: npt.NDArray[np.float64]
    ) -> None:
        phase_s = 0.0 if pace.together else pace.period_s * number / self._num_streams
        name = StreamName(run, number, round(pace.period_s * 1e6), round(phase_s * 1e6))
        expected = 1
        async for offset, count in self._arrivals(number, str(name)):
            now_s = time.monotonic()
            if offset == 0:  # of prefill, which the relay has not
                offset, count = 1, count - 1
            if offset != expected:
                raise RuntimeError(f"stream {name}: token {offset} where {expected} was due")
            arrivals_s[offset : offset + count] = now_s
            expected += count
        if expected != len(arrivals_s):
            raise RuntimeError(f"stream {name}: {expected} of {len(arrivals_s)} tokens came")

    def _arrivals(self, number: int, name: str) -> AsyncIterator[tuple[int, int]]:
        if self._kind == "http":
            return http_arrivals(self._address, name, PROMPT_TOKENS, self._sampling.max_tokens)
        channel = self._channels[number % NUM_CHANNELS]
        return (self._decoded if self._kind == "decode" else self._generated)(channel, name)

    async def _generated(
        self, channel: grpc.aio.Channel, name: str
    ) -> AsyncIterator[tuple[int, int]]:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)
        request = generation_pb2.GenerateRequest(
            request_id=name,
            token_ids=generation_pb2.TokenIds(ids=[1000] * PROMPT_TOKENS),
            sampling=self._sampling,
        )
        async for response in stub.Generate(request, timeout=TIMEOUT_S):
            if response.HasField("delta"):
                yield response.delta.token_offset, len(response.delta.token_ids)

    async def _decoded(
        self, channel: grpc.aio.Channel, name: str
    ) -> AsyncIterator[tuple[int, int]]:
        stub: Any = DecodeWorkerStub(channel)
        call = stub.Decode(timeout=TIMEOUT_S)
        reserve = worker_pb2.Reserve(
            key=worker_pb2.AttemptKey(request_id=name), sampling=self._sampling
        )
        await call.write(worker_pb2.DecodeCommand(reserve=reserve))
        await call.read()
        await call.write(worker_pb2.DecodeCommand(start=worker_pb2.Start()))
        await call.read()
        while True:
            tokens = (await call.read()).tokens
            yield tokens.tokens[0].index, len(tokens.tokens)
            if tokens.finished:
                break
        call.cancel()
