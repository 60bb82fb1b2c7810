"""GrpcTarget: a Legato service by its own API."""

from __future__ import annotations

import itertools
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

import grpc

from legato.bench.load.sample import INCOMPLETE
from legato.bench.load.spread import spread
from legato.bench.load.target import Served, ServerTimes
from legato.cluster.client_channels import CHANNEL_OPTIONS
from legato.protos import common_pb2, generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.load.sample import Sample
    from legato.bench.load.workload import LoadWorkload, Planned
    from legato.cluster.client_access import ClientAccess

    Stub = generation_pb2_grpc.GenerationAsyncStub

_ASK_TIMEOUT_S = 10.0
_GREETING_TIMEOUT_S = 60.0
_GREETING_TOKENS = 2  # of prompt and answer, each
_TIMES = (
    *("queue_s", "ticket_s", "prefill_s", "prefill_model_s", "handoff_s", "kv_transfer_s"),
    *("decode_s", "decode_model_s", "delivery_s"),
)


class GrpcTarget:
    """`addresses`: routers of one service, which take turns."""

    def __init__(self, addresses: Sequence[str], access: ClientAccess) -> None:
        self._addresses = addresses
        self._access = access
        self._stack = AsyncExitStack()
        self._served: Served | None = None
        self._vocab_size = 0

    async def __aenter__(self) -> Self:
        """Raises grpc.RpcError where the service does not say what it serves, or does not answer a
        short request; ValueError where the access cannot be.
        """
        async with AsyncExitStack() as stack:
            stubs: list[Stub] = []
            for address in self._addresses:
                channel = self._access.aio_channel(address, CHANNEL_OPTIONS)
                stack.push_async_callback(channel.close)
                stubs.append(generation_pb2_grpc.GenerationStub(channel))
            asked = generation_pb2.GetModelRequest()
            model = await stubs[0].GetModel(asked, timeout=_ASK_TIMEOUT_S)
            self._stubs = itertools.cycle(stubs)
            self._vocab_size = model.vocab_size
            greeting = _message([1 % model.vocab_size] * _GREETING_TOKENS, _GREETING_TOKENS)
            async for _ in stubs[0].Generate(greeting, timeout=_GREETING_TIMEOUT_S):
                pass
            self._served = Served(
                where=",".join(self._addresses),
                model=model.name,
                protocol="gRPC",
                prompts="token ids",
                context_length=model.context_length,
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def served(self) -> Served:
        """What is there."""
        assert self._served is not None, "used outside of `async with`"
        return self._served

    def request(self, workload: LoadWorkload, planned: Planned) -> generation_pb2.GenerateRequest:
        """Greedy, and as long as it is planned: EOS is ignored."""
        ids = workload.draw(planned, planned.input_tokens, self._vocab_size)
        return _message(ids, planned.output_tokens)

    async def send(
        self, request: generation_pb2.GenerateRequest, sample: Sample, timeout_s: float
    ) -> None:
        """As Target has it. A failure has the name of its gRPC code."""
        sample.counted_by = "token ids"
        call = next(self._stubs).Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                if response.WhichOneof("event") == "finish":
                    sample.finish = response.finish
                elif count := len(response.delta.token_ids):
                    sample.note(time.monotonic(), count)
        except grpc.aio.AioRpcError as error:
            sample.fail(time.monotonic(), error.code().name, error.details() or "")
            return
        finally:
            call.cancel()
        if sample.finish is None:
            sample.fail(time.monotonic(), INCOMPLETE, "the stream ended without its finish")
            return
        usage = sample.finish.usage
        sample.prompt_tokens = usage.prompt_tokens
        sample.cached_tokens = usage.cached_prompt_tokens
        sample.end(time.monotonic(), usage.completion_tokens)

    async def server_times(self, samples: Sequence[Sample]) -> ServerTimes:
        """Of each answer, as it says itself."""
        return answers_times(samples)


def answers_times(samples: Sequence[Sample]) -> ServerTimes:
    """What Legato's answers say of the samples that are ok."""
    finishes = [sample.finish for sample in samples if sample.ok]
    timings = [finish.timings for finish in finishes if finish is not None]
    if not timings:
        return ServerTimes(None)
    return ServerTimes(
        "each answer",
        {name: spread([getattr(timing, name) for timing in timings]) for name in _TIMES},
        {
            "kv_bytes_handed_over": sum(timing.kv_bytes_handed_over for timing in timings),
            "moved": sum(timing.attempts - 1 for timing in timings),
        },
    )


def _message(ids: list[int], max_tokens: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=ids),
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )
