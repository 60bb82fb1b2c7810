"""Command: the verified plan beside brute force over the simulation, in random cases.

    python -m legato.plan.simulation.brute_force --cases 100

Prints a line for each case, and the share in which both are the same.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from legato.plan.datasheets import DATASHEETS
from legato.plan.lengths import Lengths
from legato.plan.model_cost import ModelCost
from legato.plan.pool_sizes import smallest_pools
from legato.plan.prediction import Predictor, WorkerSize
from legato.plan.simulation.pool_search import smallest_by_brute_force, smallest_by_trial
from legato.plan.simulation.setup import Run, SimulatedService
from legato.plan.simulation.simulate import simulate
from legato.plan.step_times import RooflineTimes
from legato.plan.targets import Targets
from legato.plan.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence

GPUS = ("A100-80GB", "H100", "L4", "L40S")
MOST_WORKERS = 6  # of a case, by closed forms: brute force tries every smaller pair
MOST_LINK_BUSY = 0.7
_MOST_TRIED = 14  # workers


@dataclass(frozen=True)
class Case:
    """One service to be planned."""

    name: str
    service: SimulatedService
    traffic: Traffic
    targets: Targets
    closed: tuple[int, int]


@dataclass(frozen=True)
class Outcome:
    """Prefill and decode workers, by each way; and how many simulations each took."""

    planned: tuple[int, int] | None
    least: tuple[int, int] | None
    num_planned: int
    num_least: int


def random_case(dice: random.Random) -> Case:
    """A model, a GPU, lengths, a rate and targets by chance, with a plan of up to MOST_WORKERS."""
    while True:
        weights = dice.choice((1e9, 3e9, 8e9))
        layers = dice.choice((16, 32))
        kv_bytes = dice.choice((32_768, 131_072))
        cost = ModelCost(int(2 * weights), kv_bytes, int(weights), 0, 64 * 1024, (None,) * layers)
        gpu, link = dice.choice(GPUS), dice.choice((1.25e9, 12.5e9, 50e9))
        times = RooflineTimes.of(cost, DATASHEETS[gpu], link)
        prompt, output = dice.randint(100, 3000), dice.randint(6, 24)
        lengths = f"lognormal:{prompt}:0.6:{4 * prompt}", f"lognormal:{output}:0.5:{3 * output}"
        traffic = Traffic.of(
            2 ** dice.uniform(1, 8), Lengths.parse(lengths[0]), Lengths.parse(lengths[1])
        )
        size = WorkerSize(dice.choice((40_000, 200_000)), dice.choice((4, 16, 64)))
        alone_s = times.prefill_s(3 * prompt) + times.request_overhead_s
        step_s = times.decode_s(1, prompt)
        targets = Targets(
            alone_s * dice.uniform(1.5, 6), step_s * dice.uniform(2, 8), dice.choice((90.0, 95.0))
        )
        try:
            predictor = Predictor(times, traffic, size, targets)
            pools = smallest_pools(predictor.meets)
        except ValueError:
            continue
        if pools is None or not 3 <= sum(pools) <= MOST_WORKERS:
            continue
        # Closed forms know of no queue before a link: where these are far too few, none is a plan.
        kv_bytes_per_s = traffic.rate_per_s * float(traffic.prompt_tokens.mean()) * kv_bytes
        if kv_bytes_per_s > MOST_LINK_BUSY * link * min(pools):
            continue
        service = SimulatedService(
            times=times,
            size=WorkerSize(size.kv_rows, predictor.batch_limit),
            kv_bytes_per_token=kv_bytes,
            link_bytes_per_s=link,
            num_prefill=pools[0],
            num_decode=pools[1],
            mixes_prompts=False,
        )
        name = f"{weights / 1e9:g}B on {gpu}, {traffic.rate_per_s:.3g}/s of {prompt}+{output}"
        return Case(name, service, traffic, targets, pools)


def try_case(case: Case, run: Run) -> Outcome:
    """Both ways, on the same requests."""
    tried: set[tuple[int, int]] = set()

    @cache
    def strain(num_prefill: int, num_decode: int) -> float:
        service = SimulatedService(
            **{**vars(case.service), "num_prefill": num_prefill, "num_decode": num_decode}
        )
        tried.add((num_prefill, num_decode))
        found = simulate(service, case.traffic, run, case.targets, stops_early=True)
        return found.strain(case.targets)

    planned, num_planned = smallest_by_trial(strain, case.closed, _MOST_TRIED)
    before = len(tried)
    least = smallest_by_brute_force(strain, _MOST_TRIED)
    assert num_planned == before, "each trial is a simulation of its own"
    return Outcome(planned, least, num_planned, len(tried))


def compare(num_cases: int, num_requests: int, seed: int) -> float:
    """Prints each case; returns the share in which both ways end at the same pair."""
    num_same = num_same_closed = 0
    for number in range(num_cases):
        case = random_case(random.Random(seed * 1_000_000 + number))
        began_s = time.monotonic()
        found = try_case(case, Run(num_requests, seed))
        num_same += found.planned == found.least
        num_same_closed += case.closed == found.least
        print(
            f"{number:3} {'same' if found.planned == found.least else 'OTHER':5} "
            f"closed forms {_pair(case.closed)} planned {_pair(found.planned)} "
            f"brute force {_pair(found.least)}; {found.num_planned} of {found.num_least} "
            f"simulations, {time.monotonic() - began_s:.1f} s; {case.name}",
            flush=True,
        )
    share = num_same / num_cases
    print(
        f"the verified plan is that of brute force in {num_same} of {num_cases} cases "
        f"({100 * share:.0f} %); closed forms alone in {num_same_closed}"
    )
    return share


def _pair(pools: tuple[int, int] | None) -> str:
    return "none" if pools is None else f"{pools[0]}+{pools[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where fewer than 95 % are the same."""
    parser = argparse.ArgumentParser(prog="python -m legato.plan.simulation.brute_force")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--requests", type=int, default=400, help="of each simulation")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.cases < 1:
        parser.error(f"--cases must be at least 1, got {args.cases}")
    try:
        return 0 if compare(args.cases, args.requests, args.seed) >= 0.95 else 1
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
