"""The planner's arithmetic: cases worked out by hand, and queues played through one by one."""

from __future__ import annotations

import heapq
import math
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from legato.plan.decode_batch import decode_batch
from legato.plan.kv_room import KvRoom
from legato.plan.lengths import Lengths
from legato.plan.model_cost import ModelCost
from legato.plan.prefill_queue import Wait, beyond_both, erlang_c, prefill_wait
from legato.plan.step_times import RooflineTimes
from legato.plan.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# 7e9 weights of 2 bytes, 32 layers, 0.5 MB of KV a token.
SEVEN_B = ModelCost(14_000_000_000, 524_288, 7_000_000_000, 0, 131_072, (None,) * 32)


def roofline(flops_per_s: float = 1e15, bytes_per_s: float = 2e12) -> RooflineTimes:
    return RooflineTimes(SEVEN_B, flops_per_s, bytes_per_s, link_bytes_per_s=10e9)


def test_seven_billion_weights_at_16_bit_are_7_ms_and_140_tokens_a_second_at_2_tb_per_s() -> None:
    assert roofline().decode_s(1, 0) == pytest.approx(0.007)
    assert 1 / roofline().decode_s(1, 0) == pytest.approx(142.86, abs=0.01)
    assert roofline().bound(1, 0) == "memory bandwidth"


def test_a_batch_shares_the_weights_and_pays_for_its_kv() -> None:
    # 32 sequences of 1,000 rows: 14 GB + 32 * 0.524 GB.
    step_s = roofline().decode_s(32, 32_000)
    assert step_s == pytest.approx((14e9 + 32_000 * 524_288) / 2e12)
    # 14e9 operations a token and sequence: at 1 TFLOP/s that is what a batch waits for.
    slow = roofline(flops_per_s=1e12)
    assert slow.bound(32, 0) == "compute"
    assert slow.decode_s(32, 0) == pytest.approx(32 * 14e9 / 1e12)


def test_prefill_is_compute_bound_when_long_and_reads_the_weights_when_short() -> None:
    times = roofline()
    attention = 4 * 131_072 * 1000 * 1001 / 2
    assert times.prefill_s(1000) == pytest.approx((14e12 + attention) / 1e15)
    assert times.prefill_s(1) == pytest.approx(0.007)
    behind = times.prefill_s(100, 900)
    assert behind < times.prefill_s(1000)
    assert behind > times.prefill_s(100)


def test_the_last_layer_of_a_handoff_cannot_hide_and_a_slow_link_shows() -> None:
    fast = RooflineTimes(SEVEN_B, 1e15, 2e12, link_bytes_per_s=1e12)
    moved = 1000 * 524_288
    assert fast.handoff_s(1000) == pytest.approx(moved / 1e12 / 32)
    slow = RooflineTimes(SEVEN_B, 1e15, 2e12, link_bytes_per_s=1e9)
    assert slow.handoff_s(1000) == pytest.approx(moved / 1e9 - slow.prefill_s(1000) * 31 / 32)


def test_erlang_c() -> None:
    assert erlang_c(0.5, 1) == pytest.approx(0.5)
    # Two servers, one erlang: 1 / 3, by the textbook.
    assert erlang_c(1.0, 2) == pytest.approx(1 / 3)
    assert erlang_c(100.0, 4096) == pytest.approx(0.0, abs=1e-12)


def test_one_worker_waits_as_pollaczek_and_khinchine_say() -> None:
    # Fixed service of 1 s at half a request per second: rho s / 2 (1 - rho) = 0.5 s on average.
    wait = prefill_wait(0.5, 1.0, 1.0, 1)
    assert wait is not None
    assert wait.probability * wait.mean_s == pytest.approx(0.5)
    assert prefill_wait(1.0, 1.0, 1.0, 1) is None
    assert prefill_wait(1.0, 1.0, 1.0, 2) is not None


def test_two_waits_one_after_the_other() -> None:
    first, second = Wait(1.0, 2.0), Wait(1.0, 1.0)
    # Of two exponentials: 2 e^(-t/2) - e^(-t).
    assert beyond_both(first, second, 3.0) == pytest.approx(2 * math.exp(-1.5) - math.exp(-3))
    assert beyond_both(first, first, 2.0) == pytest.approx(2 * math.exp(-1))
    assert beyond_both(Wait(0.0, 0.0), second, 1.0) == pytest.approx(math.exp(-1))
    assert beyond_both(first, second, -1.0) == 1.0


def test_rows_are_those_at_a_random_moment_not_the_mean_request() -> None:
    # 10 + 1 token: no decode. 10 + 3: two steps, with 11 and 12 rows when they have ended.
    traffic = Traffic(1.0, np.array([10, 10]), np.array([1, 3]))
    mean, deviation = traffic.resident_rows()
    assert (mean, deviation) == (pytest.approx(11.5), pytest.approx(0.5))
    # A long answer is there for longer: 100 + 101 for 100 steps, 100 + 2 for one.
    traffic = Traffic(1.0, np.array([100, 100]), np.array([101, 2]))
    assert traffic.resident_rows()[0] == pytest.approx((100 * 150.5 + 101) / 101)


def test_sequences_that_fit() -> None:
    traffic = Traffic(1.0, np.array([90]), np.array([21]))
    room = KvRoom.of(traffic, 1000, block_size=1)
    assert room.rows_mean == pytest.approx(100.5)
    assert room.num_sequences == 9
    assert room.rows_quantile(9) <= 1000 < room.rows_quantile(10)
    with pytest.raises(ValueError, match=r"holds 100 tokens, and the longest request needs 110"):
        KvRoom.of(traffic, 100, block_size=1)


def test_a_decode_batch_with_steps_that_do_not_grow_is_poisson() -> None:
    # 100 tokens/s at 0.1 s a token: 10 sequences on average, Poisson, where there is room.
    batch = decode_batch(np.full(200, 0.1), 100.0, 50.0, 2500.0)
    assert batch is not None
    assert batch.mean_sequences == pytest.approx(10.0)
    assert batch.busy == pytest.approx(1 - math.exp(-10))
    assert batch.wait.probability < 1e-12
    # A token sees as many others as an arrival does.
    assert batch.token_shares[0] == pytest.approx(math.exp(-10))
    assert batch.token_shares[10] == pytest.approx(math.exp(-10) * 10**10 / math.factorial(10))
    # More than 10 sequences at 0.1 s a token: 100 tokens/s is what 10 can do.
    assert decode_batch(np.full(10, 0.1), 100.0, 50.0, 2500.0) is None


def test_one_place_is_a_queue_of_one_server() -> None:
    batch = decode_batch(np.array([0.1]), 5.0, 1.0, 2.0)  # exponential: half busy
    assert batch is not None
    assert batch.wait.probability == pytest.approx(0.5)
    assert batch.wait.mean_s == pytest.approx(0.2)  # 1 / (mu - lambda) of M/M/1


# Against queues that are played through.


def play_prefill(
    rate_per_s: float, draw: Callable[[random.Random], float], num_workers: int, count: int
) -> list[float]:
    """The waits, first come first served."""
    generator = random.Random(7)
    free = [0.0] * num_workers
    now, waits = 0.0, []
    for _ in range(count):
        now += generator.expovariate(rate_per_s)
        begins = max(now, heapq.heappop(free))
        waits.append(begins - now)
        heapq.heappush(free, begins + draw(generator))
    return waits


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize(
    ("draw", "square"),
    [(lambda _: 1.0, 1.0), (lambda g: g.expovariate(1.0), 2.0), (lambda g: 2 * g.random(), 4 / 3)],
    ids=["fixed", "exponential", "uniform"],
)
def test_the_prefill_queue_is_that_of_a_played_one(
    num_workers: int, draw: Callable[[random.Random], float], square: float
) -> None:
    rate = 0.8 * num_workers
    waits = sorted(play_prefill(rate, draw, num_workers, 100_000))
    wait = prefill_wait(rate, 1.0, square, num_workers)
    assert wait is not None
    played_mean = sum(waits) / len(waits)
    assert wait.probability * wait.mean_s == pytest.approx(played_mean, rel=0.12)
    p99 = waits[int(0.99 * len(waits))]
    assert wait.mean_s * math.log(wait.probability / 0.01) == pytest.approx(p99, rel=0.2)


def play_decode(
    step_s: Sequence[float], rate_per_s: float, draw: Callable[[random.Random], int], count: int
) -> tuple[float, list[float]]:
    """(mean sequences, a step's seconds for each token): whole steps, joined between them."""
    generator = random.Random(11)
    arrivals, at = [], 0.0
    for _ in range(count):
        at += generator.expovariate(rate_per_s)
        arrivals.append(at)
    now, next_one, batch, gaps, area = 0.0, 0, [], [], 0.0
    while next_one < count:
        if not batch:
            now = max(now, arrivals[next_one])
        while next_one < count and arrivals[next_one] <= now and len(batch) < len(step_s):
            batch.append(draw(generator))
            next_one += 1
        seconds = step_s[len(batch) - 1]
        gaps += [seconds] * len(batch)
        area += seconds * len(batch)
        now += seconds
        batch = [left - 1 for left in batch if left > 1]
    return area / now, gaps


@pytest.mark.parametrize(
    ("draw", "mean", "square"),
    [
        (lambda _: 40, 40.0, 1600.0),
        (lambda g: g.choice([4, 76]), 40.0, (16 + 5776) / 2),
    ],
    ids=["fixed", "short and long"],
)
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_decode_batch_is_that_of_played_steps(
    draw: Callable[[random.Random], int], mean: float, square: float, load: float
) -> None:
    step_s = np.array([0.010 + 0.0005 * k for k in range(1, 65)])
    tokens_per_s = load * 64 / step_s[-1]
    found = decode_batch(step_s, tokens_per_s, mean, square)
    assert found is not None
    played_mean, gaps = play_decode(step_s.tolist(), tokens_per_s / mean, draw, 30_000)
    assert found.mean_sequences == pytest.approx(played_mean, rel=0.05)
    gaps.sort()
    for percent in (50, 99):
        played = gaps[math.ceil(len(gaps) * percent / 100) - 1]
        assert found.step_percentile_s(percent) == pytest.approx(played, rel=0.05)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("512", [512, 512, 512]),
        ("100..199", [110, 150, 190]),
        ("lognormal:100:0.5:1000", [53, 100, 190]),
    ],
)
def test_lengths(text: str, values: list[int]) -> None:
    lengths = Lengths.parse(text)
    assert [lengths.quantile(share) for share in (0.1, 0.5, 0.9)] == values


@pytest.mark.parametrize(
    "text", ["", "0", "9..3", "lognormal:100:0.5", "lognormal:100:9:1000", "-5", "5000000000"]
)
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        Lengths.parse(text)
