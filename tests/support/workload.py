"""A mix of requests that shows a lost, doubled or other token, and a client that records them."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
from history import CallHistory, Piece, check_all
from raw_client import RawClient

from legato.cluster.client import Finished
from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from legato.cluster.client import AsyncClient, Event

VOCABULARY = 256  # of plain bytes: see tiny_models
STOPS = ("q", "Z", "%", "th", "e ", "a1", "(x", "=>")
KINDS = ("greedy", "seeded", "penalties", "logprobs", "several", "stops", "guided")
# Text that goes on to the end of the longest answer: where it stands shows in every token.
GUIDE = common_pb2.Guide(regex=r"([a-z]{2,7}(, |-[0-9]{1,3}\. )){9,}\n")


def _sampling(kind: str, dice: random.Random, max_tokens: int) -> common_pb2.SamplingParams:
    sampling = common_pb2.SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=dice.randrange(1 << 40)
    )
    if kind != "greedy" and dice.random() < 0.7:
        sampling.temperature, sampling.top_p = 0.9, 0.95
    match kind:
        case "seeded" | "several":
            sampling.temperature, sampling.top_k = 0.8, 60
        case "penalties":
            sampling.repetition_penalty, sampling.presence_penalty = 1.3, 0.4
            sampling.frequency_penalty = 0.2
            sampling.logit_bias[65] = 2.0
        case "logprobs":
            sampling.logprobs = 2
        case "stops":
            sampling.stop.extend(STOPS)
            sampling.min_tokens = max_tokens // 2
        case "guided":
            sampling.guide.CopyFrom(GUIDE)
            sampling.min_tokens = max_tokens // 2
    return sampling


def mixed(
    number: int, *, seed: int, longest_prompt: int = 600, longest_answer: int = 300
) -> list[generation_pb2.GenerateRequest]:
    """So many requests of each kind in turn; the same ones for the same arguments."""
    dice = random.Random(seed)
    requests = []
    for index in range(number):
        kind = KINDS[index % len(KINDS)]
        num_prompt = dice.choice((dice.randint(1, 40), dice.randint(1, longest_prompt)))
        max_tokens = dice.randint(longest_answer // 6, longest_answer)
        request = generation_pb2.GenerateRequest(
            sampling=_sampling(kind, dice, max_tokens // 2 if kind == "several" else max_tokens),
            n=3 if kind == "several" else 1,
            request_id=f"{kind}-{index}",
            cache_salt=f"{index}",  # each computes its prompt itself
        )
        request.token_ids.ids.extend(dice.randrange(VOCABULARY) for _ in range(num_prompt))
        requests.append(request)
    return requests


def again(request: generation_pb2.GenerateRequest, name: str) -> generation_pb2.GenerateRequest:
    """The same under another id, which shares no KV with the first; its answer is the same."""
    copy = generation_pb2.GenerateRequest()
    copy.CopyFrom(request)
    copy.request_id += name
    copy.cache_salt += name
    return copy


async def record(
    client: RawClient,
    request: generation_pb2.GenerateRequest,
    *,
    timeout_s: float,
    cancel_after: int | None = None,
    seen: Callable[[CallHistory], None] = lambda call: None,
) -> CallHistory:
    """One call to its end; cancelled by us once it has brought so many tokens. `seen` is called
    after each message.
    """
    call = CallHistory(request.request_id, request.n or 1, time.time())
    num_tokens = 0
    try:
        async for response in client.generate(request, timeout_s=timeout_s):
            piece = _piece(response)
            call.pieces.append(piece)
            num_tokens += len(piece.token_ids)
            seen(call)
            if cancel_after is not None and num_tokens >= cancel_after:
                call.cancelled_at_s = time.time()
                break  # closes the generator, which cancels the call
    except grpc.aio.AioRpcError as error:
        call.error = f"{error.code().name} {error.details()}"
    call.ended_at_s = time.time()
    return call


async def record_stream(
    client: AsyncClient,
    request: generation_pb2.GenerateRequest,
    *,
    timeout_s: float,
    seen: Callable[[CallHistory], None] = lambda call: None,
) -> CallHistory:
    """What the user of the client that goes on elsewhere sees. `seen` as in `record`."""
    call = CallHistory(request.request_id, request.n or 1, time.time())
    stream = client.stream(request, timeout_s=timeout_s)
    try:
        async for event in stream:
            call.pieces.append(_piece_of(event))
            seen(call)
    except grpc.RpcError as error:
        call.error = f"{error.code().name} {error.details()}"
    call.num_calls = stream.num_attempts
    call.ended_at_s = time.time()
    return call


def _piece_of(event: Event) -> Piece:
    now_s = time.time()
    if isinstance(event, Finished):
        return _finish(now_s, event.index, event.finish)
    logprobs = tuple(token.logprob for token in event.logprobs)
    return Piece(now_s, event.index, event.token_offset, event.token_ids, event.text, logprobs)


def _piece(response: generation_pb2.GenerateResponse) -> Piece:
    now_s = time.time()
    if response.HasField("finish"):
        return _finish(now_s, response.index, response.finish)
    delta = response.delta
    return Piece(
        now_s,
        response.index,
        delta.token_offset,
        tuple(delta.token_ids),
        delta.text,
        tuple(token.logprob for token in delta.logprobs),
    )


def _finish(at_s: float, index: int, finish: generation_pb2.Finish) -> Piece:
    return Piece(
        at_s,
        index,
        finish_reason=finish.finish_reason,
        stop_reason=finish.stop_reason,
        num_tokens=finish.usage.completion_tokens,
        attempts=finish.timings.attempts,
        seed=finish.usage.seed,
    )


async def run_all(
    address: str,
    requests: Sequence[generation_pb2.GenerateRequest],
    *,
    at_once: int,
    timeout_s: float = 120.0,
    cancel_every: int = 0,
) -> list[CallHistory]:
    """All of them, so many at a time. Each `cancel_every`-th is cancelled half-way."""
    free = asyncio.Semaphore(at_once)
    async with RawClient(address) as client:

        async def one(index: int, request: generation_pb2.GenerateRequest) -> CallHistory:
            cancelled = cancel_every and index % cancel_every == cancel_every - 1
            cancel_after = request.sampling.max_tokens // 2 if cancelled else None
            async with free:
                return await record(client, request, timeout_s=timeout_s, cancel_after=cancel_after)

        return await asyncio.gather(*(one(i, request) for i, request in enumerate(requests)))


@dataclass
class Pump:
    """Keeps a service busy with the same requests again and again; `calls` are those that ended."""

    calls: list[CallHistory] = field(default_factory=list)

    def wrong(
        self,
        references: Mapping[str, CallHistory],
        decode: Callable[[Sequence[int]], str],
    ) -> list[str]:
        """What is, of all calls; `references` by the first part of the requests' ids."""
        wrong: list[str] = []
        for call in self.calls:
            reference = references[call.request_id.partition(" ")[0]]
            wrong += check_all([call], {call.request_id: reference}, decode)
        return wrong


@asynccontextmanager
async def pump(
    address: str,
    requests: Sequence[generation_pb2.GenerateRequest],
    name: str,
    *,
    at_once: int,
    timeout_s: float = 120.0,
) -> AsyncIterator[Pump]:
    """Runs during the block; at its end no new ones begin, and all have ended."""
    it, counter, stopped = Pump(), itertools.count(), asyncio.Event()
    async with RawClient(address) as client:

        async def one_after_the_other() -> None:
            while not stopped.is_set():
                number = next(counter)
                request = again(requests[number % len(requests)], f" {name} {number}")
                it.calls.append(await record(client, request, timeout_s=timeout_s))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(one_after_the_other())
            try:
                yield it
            finally:
                stopped.set()
