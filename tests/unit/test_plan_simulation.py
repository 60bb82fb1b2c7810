"""The simulated service: beside queues that are played by hand, the closed forms, and itself."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.cluster.config import EngineOptions, RouterOptions
from legato.plan.decode_batch import decode_batch
from legato.plan.prediction import WorkerSize
from legato.plan.simulation.arrivals import Arrival, draw_arrivals
from legato.plan.simulation.brute_force import random_case, try_case
from legato.plan.simulation.cluster import START_S
from legato.plan.simulation.histogram import Histogram
from legato.plan.simulation.pool_search import smallest_by_brute_force, smallest_by_trial
from legato.plan.simulation.setup import Run, SimulatedService
from legato.plan.simulation.simulate import replay, simulate
from legato.plan.simulation.virtual_loop import StandstillError, VirtualLoop
from legato.plan.targets import Targets
from legato.plan.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.plan.simulation.result import Result


@dataclass(frozen=True)
class FixedTimes:
    """Each prompt takes `prompt_s`, a step `step_s` and `more_s` for each of its sequences."""

    prompt_s: float = 0.1
    step_s: float = 0.001
    more_s: float = 0.0
    kv_s: float = 0.0
    request_overhead_s: float = 0.0
    jitter: Sequence[float] = (1.0,)

    def prefill_s(self, num_tokens: int, context_tokens: int = 0) -> float:
        return self.prompt_s

    def prefill_step_s(self, parts: Sequence[tuple[int, int]]) -> float:
        return self.prompt_s * len(parts)

    def decode_s(self, num_sequences: int, rows: float) -> float:
        return self.step_s + self.more_s * num_sequences

    def handoff_s(self, num_tokens: int) -> float:
        return self.kv_s

    def bound(self, num_sequences: int, rows: float) -> str:
        return "measured step time"


# One is all that the router gives a prefill worker at once, and one step computes it.
LONG = 2100
SERVICE = SimulatedService(
    times=FixedTimes(),
    size=WorkerSize(kv_rows=1_000_000, max_batch_size=64),
    kv_bytes_per_token=1000,
    link_bytes_per_s=1e12,
    num_prefill=1,
    num_decode=1,
    engine=EngineOptions(prefill_chunk_tokens=4096),
)
RUN = Run(num_requests=1000, seed=5)


def traffic(rate_per_s: float, prompt: int, output: int) -> Traffic:
    return Traffic(rate_per_s, np.array([prompt]), np.array([output]))


def played(arrivals_s: Sequence[float], service_s: float, num_servers: int = 1) -> list[float]:
    """Times in a queue of fixed services, first come first served."""
    free = [0.0] * num_servers
    times = []
    for at_s in arrivals_s:
        server = free.index(min(free))
        free[server] = max(at_s, free[server]) + service_s
        times.append(free[server] - at_s)
    return times


def percentile(values: Sequence[float], percent: float) -> float:
    return sorted(values)[max(0, int(np.ceil(percent / 100 * len(values))) - 1)]


def measured(values: list[float], run: Run = RUN) -> list[float]:
    return values[run.first_measured : run.end_measured]


def rate(found: Result) -> float:
    """Of the requests that came while it was measured."""
    return found.measured_requests / found.measured_s


@pytest.mark.parametrize("num_workers", [1, 3])
def test_prompts_wait_as_in_a_queue_first_come_first_served(num_workers: int) -> None:
    offered = traffic(8.0 * num_workers, LONG, 1)
    service = replace(SERVICE, num_prefill=num_workers)
    found = simulate(service, offered, RUN)
    arrivals = [a.at_s for a in draw_arrivals(offered, RUN.num_requests, RUN.seed)]
    exact = measured(played(arrivals, 0.1, num_workers))
    for percent, estimate in found.ttft_s.items():
        assert estimate.value == pytest.approx(percentile(exact, percent), abs=1e-6)
    assert found.prefill_busy == pytest.approx(rate(found) * 0.1 / num_workers, rel=0.02)


def test_a_slow_link_is_a_queue_too() -> None:
    # 256 tokens are 0.1 s of the link; each prompt waits for those before it.
    times = FixedTimes(prompt_s=1e-6, kv_s=0.1, step_s=1e-6)
    service = replace(SERVICE, times=times, link_bytes_per_s=2_560_000)
    offered = traffic(7.0, 256, 2)
    found = simulate(service, offered, RUN)
    arrivals = [a.at_s for a in draw_arrivals(offered, RUN.num_requests, RUN.seed)]
    exact = measured(played(arrivals, 0.1))
    for percent, estimate in found.e2e_s.items():
        assert estimate.value == pytest.approx(percentile(exact, percent), rel=1e-3)
    assert found.link_busy == pytest.approx(rate(found) * 0.1, rel=0.02)
    assert found.link_bytes_per_s == pytest.approx(rate(found) * 256_000, rel=0.02)
    assert found.limited_by == "links"


def test_several_links_share_nothing_but_the_receivers() -> None:
    times = FixedTimes(prompt_s=1e-6, kv_s=0.1, step_s=1e-6)
    one_receiver = replace(SERVICE, times=times, link_bytes_per_s=2_560_000, num_prefill=4)
    offered = traffic(7.0, 256, 2)
    run = Run(num_requests=400, seed=5)
    crowded = simulate(one_receiver, offered, run)
    spread = simulate(replace(one_receiver, num_decode=4), offered, run)
    assert crowded.link_busy == pytest.approx(rate(crowded) * 0.1, rel=0.02)
    assert spread.link_busy < 0.6
    assert spread.e2e_mean_s < 0.85 * crowded.e2e_mean_s


def test_the_decode_batch_is_as_closed_forms_say() -> None:
    times = FixedTimes(prompt_s=1e-6, step_s=0.01, more_s=0.001)
    service = replace(SERVICE, times=times)
    offered = traffic(9.0, 200, 51)
    found = simulate(service, offered, Run(num_requests=2000, seed=3))
    step_s = np.array([times.decode_s(k, 0) for k in range(1, 65)])
    exact = decode_batch(step_s, rate(found) * 50, 50.0, 2500.0)
    assert exact is not None
    assert found.batch_mean == pytest.approx(exact.mean_sequences, rel=0.05)
    assert found.decode_busy == pytest.approx(exact.busy, rel=0.02)
    for percent in (50.0, 90.0):
        assert found.itl_s[percent].value == pytest.approx(
            exact.step_percentile_s(percent), rel=0.1
        )
    # Little's law: KV held is arrivals, seconds and rows.
    held_rows = found.kv_share * service.num_blocks * 16
    assert held_rows == pytest.approx(found.batch_mean * 232, rel=0.1)


SMALL_KV = replace(
    SERVICE,
    times=FixedTimes(prompt_s=0.01, step_s=0.01, jitter=(0.9, 1.0, 1.2), request_overhead_s=0.004),
    size=WorkerSize(kv_rows=1600, max_batch_size=64),
    num_prefill=2,
    num_decode=2,
    num_routers=2,
    mixes_prompts=False,
)


def crowded() -> Result:
    """KV runs out: requests are refused their tickets, wait, are preempted, swapped, returned."""
    offered = Traffic(14.0, np.array([40, 300]), np.array([60, 300]))
    return simulate(SMALL_KV, offered, Run(num_requests=200, seed=1))


def test_the_same_seed_gives_the_same_bytes_in_any_process() -> None:
    here = crowded()
    assert here.preemptions > 0
    assert here.kv_share > 0.6
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    script = "import test_plan_simulation as t; print(t.crowded().text())"
    there = subprocess.run(
        [sys.executable, "-c", script],
        env={
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert there.stdout == here.text() + "\n"


def test_given_requests_are_replayed_all_of_them() -> None:
    at_once = [Arrival(number, 0.0, LONG, 1) for number in range(8)]
    found = replay(SERVICE, at_once)
    # 0.1 s each: one after the other where all come at once, alone where each waits for the last.
    assert (found.ttft_s[50.0], found.ttft_s[99.0]) == pytest.approx((0.4, 0.8))
    alone = replay(SERVICE, at_once, concurrency=1)
    assert (alone.ttft_s[50.0], alone.ttft_s[99.0]) == pytest.approx((0.1, 0.1))
    pairs = replay(SERVICE, at_once, concurrency=2)
    assert pairs.ttft_s[50.0] == pytest.approx(0.2)


def test_another_seed_gives_other_requests() -> None:
    offered = traffic(8.0, LONG, 1)
    one, other = (simulate(SERVICE, offered, Run(200, seed)).ttft_mean_s for seed in (1, 2))
    assert one != other


def test_too_many_requests_are_refused_and_miss_the_target() -> None:
    service = replace(SERVICE, options=RouterOptions(max_queued_requests=20))
    offered, targets = traffic(30.0, LONG, 1), Targets(ttft_s=5.0, itl_s=1.0, percent=90)
    found = simulate(service, offered, Run(500), targets)
    assert found.refused > 150
    assert found.strain(targets) > 1
    assert '"p99": {"value": null' in found.text()
    cut = simulate(service, offered, Run(500), targets, stops_early=True)
    assert cut.is_cut
    assert cut.strain(targets) > 1


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ValueError, match="prefixes in common are not simulated"):
        simulate(SERVICE, replace(traffic(1.0, 10, 1), prefix_share=0.5), RUN)
    with pytest.raises(ValueError, match=r"num_requests must be in \[100, "):
        Run(num_requests=99)
    with pytest.raises(ValueError, match=r"num_routers must be in \[1, "):
        replace(SERVICE, num_routers=0)


def test_a_loop_in_which_nothing_can_happen_ends() -> None:
    loop = VirtualLoop()
    with pytest.raises(StandstillError):
        loop.run_until_complete(loop.create_future())
    loop.close()
    assert loop.time() < START_S


def test_a_histogram_is_within_a_quarter_of_a_percent() -> None:
    values = [0.001 * 1.01**n for n in range(500)]
    histogram = Histogram()
    for value in values:
        histogram.add(value, 3)
    for percent in (1, 50, 99, 100):
        assert histogram.percentile(percent) == pytest.approx(
            percentile(values, percent), rel=0.0026
        )
    assert histogram.mean == pytest.approx(sum(values) / len(values))


@settings(max_examples=200, deadline=None)
@given(
    frontier=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    start=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_the_search_finds_what_brute_force_finds(
    frontier: list[int], start: tuple[int, int]
) -> None:
    """`frontier`: fewest decode workers by prefill workers, from 1; never rising."""
    least = [min(frontier[: place + 1]) for place in range(len(frontier))]
    tried: list[tuple[int, int]] = []

    def strain(prefill: int, decode: int) -> float:
        tried.append((prefill, decode))
        return least[min(prefill, len(least)) - 1] / decode

    found, count = smallest_by_trial(strain, start, most=48)
    assert count == len(tried) == len(set(tried))
    assert found == smallest_by_brute_force(strain, most=48)


@pytest.mark.parametrize("number", [0, 1])
def test_a_verified_plan_is_that_of_brute_force(number: int) -> None:
    """`make test-plan` tries a hundred."""
    case = random_case(random.Random(number))
    found = try_case(case, Run(num_requests=150, seed=1))
    assert found.planned == found.least is not None
    assert found.num_planned <= found.num_least
