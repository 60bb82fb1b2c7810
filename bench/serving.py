"""A load of concurrent streams on a running service, and one JSON line of what it measured.

    python -m legato.bench.serving --address 127.0.0.1:50051 --streams 8 --requests 32

Latencies are those of this client: times at which messages arrived. A message that carries
several tokens counts its gap once a token, spread evenly. Throughput is that of the window in
which all streams were busy at once, so that the start and the tail of the run do not dilute it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import grpc

from legato.protos import common_pb2, generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

INT32_MAX = 2**31 - 1
PROMPT_TOKEN = 97  # "a" in byte-level vocabularies; any id does where EOS is ignored


@dataclass(frozen=True)
class Load:
    """What to send."""

    address: str
    num_streams: int
    num_requests: int
    prompt_tokens: int
    max_tokens: int
    timeout_s: float


@dataclass
class Sample:
    """One request; times are on this client's monotonic clock."""

    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    finish: generation_pb2.Finish | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """Finished, with as many tokens as the service says."""
        return self.finish is not None and len(self.token_times_s) == (
            self.finish.usage.completion_tokens
        )


async def run_load(load: Load) -> list[Sample]:
    """Keeps `num_streams` requests under way until all have been sent."""
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(load.address, options=options) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        numbers = iter(range(load.num_requests))
        streams = (_stream(stub, load, numbers) for _ in range(load.num_streams))
        return [sample for samples in await asyncio.gather(*streams) for sample in samples]


async def _stream(
    stub: generation_pb2_grpc.GenerationAsyncStub, load: Load, numbers: Iterator[int]
) -> list[Sample]:
    return [await _request(stub, load, number) for number in numbers]


async def _request(
    stub: generation_pb2_grpc.GenerationAsyncStub, load: Load, number: int
) -> Sample:
    request = generation_pb2.GenerateRequest(
        # Prompts differ, as those of different users do.
        token_ids=generation_pb2.TokenIds(
            ids=[PROMPT_TOKEN + (number + i) % 26 for i in range(load.prompt_tokens)]
        ),
        sampling=common_pb2.SamplingParams(
            max_tokens=load.max_tokens, temperature=0.0, ignore_eos=True
        ),
    )
    sample = Sample(sent_s=time.monotonic())
    try:
        async for response in stub.Generate(request, timeout=load.timeout_s):
            if response.WhichOneof("event") == "finish":
                sample.finish = response.finish
            else:
                _note_tokens(sample, time.monotonic(), len(response.delta.token_ids))
    except grpc.aio.AioRpcError as error:
        sample.error = f"{error.code().name}: {error.details()}"
    return sample


def _note_tokens(sample: Sample, now_s: float, count: int) -> None:
    last_s = sample.token_times_s[-1] if sample.token_times_s else now_s
    sample.token_times_s += [last_s + (now_s - last_s) * (i + 1) / count for i in range(count)]


def summarise(samples: Sequence[Sample], num_streams: int) -> dict[str, object]:
    """The JSON line. With any failed request there are counts and errors, and no figures."""
    failed = [sample for sample in samples if not sample.ok]
    result: dict[str, object] = {"requests": len(samples), "failed": len(failed)}
    if failed or not samples:
        result["errors"] = sorted({sample.error or "incomplete" for sample in failed})[:5]
        return result
    ttfts = [sample.token_times_s[0] - sample.sent_s for sample in samples]
    gaps = [b - a for sample in samples for a, b in pairwise(sample.token_times_s)]
    timings = [sample.finish.timings for sample in samples if sample.finish is not None]
    result["ttft_s"] = _spread(ttfts)
    result["itl_s"] = _spread(gaps) if gaps else None
    result["output_tokens_per_s"] = _busy_rate(samples, num_streams)
    for name in ("queue_s", "ticket_s", "prefill_s", "handoff_s", "decode_s", "delivery_s"):
        result[f"server_{name}"] = _spread([getattr(timing, name) for timing in timings])
    for name in ("prefill_model_s", "decode_model_s", "kv_transfer_s"):
        result[f"server_{name}"] = _spread([getattr(timing, name) for timing in timings])
    result["kv_bytes_handed_over"] = sum(timing.kv_bytes_handed_over for timing in timings)
    result["moved"] = sum(timing.attempts - 1 for timing in timings)
    return result


def _busy_rate(samples: Sequence[Sample], num_streams: int) -> float | None:
    """Tokens per second while `num_streams` requests were being answered at once."""
    edges = sorted(
        [(sample.token_times_s[0], 1) for sample in samples]
        + [(sample.token_times_s[-1], -1) for sample in samples]
    )
    busy, active, full_s = [], 0, None
    for at_s, change in edges:
        active += change
        if active == num_streams:
            full_s = at_s
        elif full_s is not None:
            busy.append((full_s, at_s))
            full_s = None
    seconds = sum(end - start for start, end in busy)
    if seconds <= 0:
        return None
    tokens = sum(
        start < at_s <= end for sample in samples for at_s in sample.token_times_s
        for start, end in busy
    )  # fmt: skip
    return tokens / seconds


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    ranks = {"p50": 50, "p99": 99, "max": 100}
    return {
        name: round(ordered[max(0, math.ceil(len(ordered) * rank / 100) - 1)], 6)
        for name, rank in ranks.items()
    }


def main() -> int:
    """Prints one JSON line; 1 where a request failed: figures of such a run mean nothing."""
    parser = argparse.ArgumentParser(prog="python -m legato.bench.serving", description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--streams", type=int, default=8, help="requests under way at a time")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one request")
    args = parser.parse_args()
    for name in ("streams", "requests", "prompt_tokens", "max_tokens"):
        value = getattr(args, name)
        if not 1 <= value <= INT32_MAX:
            parser.error(f"--{name.replace('_', '-')} must be in [1, {INT32_MAX}], got {value}")
    load = Load(
        address=args.address,
        num_streams=args.streams,
        num_requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens,
        timeout_s=args.timeout,
    )
    settings = {"streams": load.num_streams, "prompt_tokens": load.prompt_tokens}
    result = summarise(asyncio.run(run_load(load)), min(load.num_streams, load.num_requests))
    print(json.dumps(settings | {"max_tokens": load.max_tokens} | result))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
