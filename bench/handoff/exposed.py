"""Exposed: what a client feels of the hand-off: a longer gap between its first two tokens."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import grpc

from legato.bench.handoff.service import running_service, until_ready
from legato.bench.handoff.spread import Spread
from legato.bench.workload import Workload
from legato.cluster.text.model_text import ModelText
from legato.protos import (
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
)
from legato.worker.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT_TOKENS = (512, 1024, 2048)
MAX_TOKENS = 17  # 15 gaps behind the first give the decode step
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class StreamTimes:
    """One request, alone on the service; times in seconds on this client's clock."""

    token_times_s: tuple[float, ...]
    prefill_model_s: float
    handoff_s: float  # the router's: first token until the sequence was in the batch
    transfer_s: float  # the prefill worker's
    kv_bytes: int

    @property
    def decode_step_s(self) -> float:
        """The median gap behind the second token."""
        return statistics.median(b - a for a, b in pairwise(self.token_times_s[1:]))

    @property
    def exposed_s(self) -> float:
        """What the gap between the first and the second token is beyond a decode step; below 0
        where it was a short one.
        """
        return self.token_times_s[1] - self.token_times_s[0] - self.decode_step_s


@dataclass(frozen=True)
class Exposed:
    """Of several requests with prompts of one length."""

    prompt_tokens: int
    kv_bytes: int
    exposed_s: Spread
    decode_step_s: Spread
    prefill_model_s: Spread
    handoff_s: Spread
    transfer_s: Spread
    exposed_of_prefill: Spread  # exposed_s over prefill_model_s of each request

    @classmethod
    def of(cls, prompt_tokens: int, streams: Sequence[StreamTimes]) -> Exposed:
        """Raises ValueError where there is none."""
        exposed = [stream.exposed_s for stream in streams]
        prefill = [stream.prefill_model_s for stream in streams]
        return cls(
            prompt_tokens=prompt_tokens,
            kv_bytes=max((stream.kv_bytes for stream in streams), default=0),
            exposed_s=Spread.of(exposed),
            decode_step_s=Spread.of([stream.decode_step_s for stream in streams]),
            prefill_model_s=Spread.of(prefill),
            handoff_s=Spread.of([stream.handoff_s for stream in streams]),
            transfer_s=Spread.of([stream.transfer_s for stream in streams]),
            exposed_of_prefill=Spread.of_ratios(exposed, prefill),
        )

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


async def measure_exposed(
    model: str, num_rounds: int, prompt_tokens: Sequence[int], worker_arguments: Sequence[str]
) -> list[Exposed]:
    """Lengths take turns in each round; one more round comes first and does not count.

    Raises:
        ValueError: there is no such model.
        RuntimeError: a worker did not start, or an answer is not whole.
    """
    text = ModelText.load(resolve_model(model))
    streams: dict[int, list[StreamTimes]] = {count: [] for count in prompt_tokens}
    async with (
        running_service(model, text, worker_arguments) as address,
        grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        stub: generation_pb2_grpc.GenerationAsyncStub = generation_pb2_grpc.GenerationStub(channel)
        await until_ready(channel)
        for turn in range(num_rounds + 1):
            for count in prompt_tokens:
                workload = Workload(f"prompt{count}", 1, 1, count, MAX_TOKENS)
                [prompt] = workload.prompts(text.num_tokens, run=turn * len(streams) + count)
                times = await _stream(stub, prompt)
                if turn > 0:
                    streams[count].append(times)
    return [Exposed.of(count, times) for count, times in streams.items()]


async def _stream(
    stub: generation_pb2_grpc.GenerationAsyncStub, prompt: Sequence[int]
) -> StreamTimes:
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True),
    )
    times: list[float] = []
    finish: generation_pb2.Finish | None = None
    try:
        async for response in stub.Generate(request, timeout=_TIMEOUT_S):
            if response.WhichOneof("event") == "finish":
                finish = response.finish
            else:
                times += [time.perf_counter()] * len(response.delta.token_ids)
    except grpc.aio.AioRpcError as error:
        raise RuntimeError(f"{error.code().name}: {error.details()}") from None
    if finish is None or len(times) != MAX_TOKENS:
        raise RuntimeError(f"the answer has {len(times)} of {MAX_TOKENS} tokens")
    timings = finish.timings
    if timings.attempts != 1 or not timings.kv_bytes_handed_over:
        raise RuntimeError(
            f"{timings.attempts} attempts, {timings.kv_bytes_handed_over} bytes of KV handed over"
        )
    return StreamTimes(
        tuple(times),
        timings.prefill_model_s,
        timings.handoff_s,
        timings.kv_transfer_s,
        timings.kv_bytes_handed_over,
    )
