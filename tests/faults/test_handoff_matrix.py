"""Every message of a hand-off is cut, stalled, doubled, moved, truncated or has a bit flipped: the
answer is exact or the hand-off fails with a reason, and nothing is left held.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import pytest
from fake_engine import FakeModel, fake_config
from link_proxy import DIRECTIONS, KINDS, Fault, LinkProxy
from worker_pair import Attempt, Pair, running_pair, sampling

if TYPE_CHECKING:
    from collections.abc import Iterator


FULL = os.environ.get("LEGATO_FAULT_CASES") == "full"
# Every n-th case where the size is not full; no divisor of the number of kinds, so that all come.
STRIDE = 1 if FULL else 7
AT_ONCE = 24
NUM_TOKENS = 12
CONFIG = fake_config(num_layers=5)
MODEL = FakeModel(CONFIG)
# A hand-off that ends by itself does so within: 5 s without progress, and a silence before that.
BOUND_S = 15.0


@dataclass(frozen=True)
class Shape:
    """One kind of transfer. The prefill chunk is 16 tokens."""

    name: str
    prompt_len: int
    lane: str


SHAPES = [
    Shape(f"{length}-{lane}", length, lane)
    for length, lane in itertools.product((1, 16, 50, 90), ("grpc", "auto"))
]


def prompt_of(length: int, salt: int) -> list[int]:
    return [(i * 37 + salt * 101 + 5) % 320 for i in range(length)]


async def drive(pair: Pair, proxy: LinkProxy, prompt: list[int], number: int) -> str:
    """The router's part. Returns what became of it: exact, or why the hand-off failed."""
    attempt = Attempt(pair, prompt, sampling(NUM_TOKENS), request_id=f"r{number}")
    try:
        await attempt.reserve()
        attempt.start_prefill(proxy.address)
        await attempt.first_token()
        await attempt.start_decode()
        event = await attempt.handoff()
        if event.WhichOneof("event") == "handoff_failed":
            assert event.handoff_failed.reason
            return "failed: " + event.handoff_failed.reason
        assert event.WhichOneof("event") == "handoff_done"
        await attempt.finish_all()
        [tokens] = attempt.answers.values()
        assert tokens == MODEL.expected(prompt, NUM_TOKENS), "wrong tokens"
        return "exact"
    finally:
        attempt.close()


async def count_messages(pair: Pair, shape: Shape) -> dict[str, int]:
    async with LinkProxy(pair.d.address) as proxy:
        assert await drive(pair, proxy, prompt_of(shape.prompt_len, 0), 0) == "exact"
        return dict(proxy.num_messages)


def faults_of(counts: dict[str, int]) -> Iterator[Fault]:
    bits = itertools.cycle((3, 77, 1001, 40_007))
    for kind, direction in itertools.product(KINDS, DIRECTIONS):
        for index in range(counts[direction]):
            yield Fault(kind, direction, index, next(bits))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
async def test_whatever_becomes_of_a_message(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHUNK_BYTES", "SLOT_BYTES"):
        monkeypatch.setattr(f"legato.worker.handoff.lanes.{name}", 1024)
    lane = {"kv_lane": shape.lane}
    async with running_pair(
        config=CONFIG, p={"num_blocks": 2048, **lane}, d={"num_blocks": 2048, **lane}
    ) as pair:
        counts = await count_messages(pair, shape)
        faults = list(faults_of(counts))[:: STRIDE if shape.prompt_len > 1 else 2]
        fates: Counter[str] = Counter()
        turns = asyncio.Semaphore(AT_ONCE)

        async def run(number: int, fault: Fault) -> None:
            prompt = prompt_of(shape.prompt_len, number)
            async with turns, LinkProxy(pair.d.address, fault) as proxy:
                try:
                    async with asyncio.timeout(BOUND_S):
                        fate = await drive(pair, proxy, prompt, number)
                except grpc.aio.AioRpcError as error:
                    raise AssertionError(f"{fault}: {error.code()} {error.details()}") from error
                except (AssertionError, TimeoutError) as error:
                    raise AssertionError(f"{fault}: {error!r}") from error
                assert proxy.fired, f"{fault} struck nothing"
                # What the transfer's own words say when they are damaged may end it; rows may not.
                may_fail = fault.kind in ("truncate", "flip")
                assert fate == "exact" or may_fail, f"{fault}: {fate}"
                fates[fault.kind + ": " + fate.partition(":")[0]] += 1

        await asyncio.gather(*(run(i + 1, fault) for i, fault in enumerate(faults)))
        print(f"{shape.name}: {len(faults)} of {sum(counts.values()) * len(KINDS)}: {fates}")
        assert sum(fates.values()) == len(faults) >= 10
        await pair.until_idle()
