"""VerifiedPlan: the number of workers that the simulation confirms, from that of closed forms."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from legato.plan.answer import answer_of
from legato.plan.prediction import Slowdown
from legato.plan.simulation.pool_search import smallest_by_trial
from legato.plan.simulation.setup import Run, SimulatedService
from legato.plan.simulation.simulate import simulate

if TYPE_CHECKING:
    from legato.plan.answer import Answer
    from legato.plan.basis import Basis
    from legato.plan.prediction import Prediction, Predictor
    from legato.plan.simulation.result import Result

# Beyond, a plan is simulated as it is, and no smaller one is looked for.
MAX_SEARCHED = 64
# The least for a p99, and what a simulation may take.
LEAST_REQUESTS, MOST_REQUESTS = 2000, 20_000
_REQUESTS_A_PLACE = 6  # for each that is under way: then the measured time is four answers long
_MORE = 2.0  # times as many workers as closed forms say are tried at most


@dataclass(frozen=True)
class VerifiedPlan:
    """`is_least`: fewer were tried and do not keep the targets."""

    prefill_workers: int
    decode_workers: int
    result: Result
    num_simulations: int
    is_least: bool

    def answer(self, predictor: Predictor, closed: Answer, kv_bytes_per_token: int) -> Answer:
        """That of closed forms for so many workers; where these take them for too few, what
        `closed` says of the number that they would have.
        """
        pools = self.prefill_workers, self.decode_workers
        return answer_of(predictor, kv_bytes_per_token, *pools) or replace(
            closed, prefill_workers=pools[0], decode_workers=pools[1]
        )

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            **self.result.as_json(),
            "num_simulations": self.num_simulations,
            "is_least": self.is_least,
        }


def simulated_service(
    basis: Basis, predictor: Predictor, num_prefill: int, num_decode: int, slowdown: Slowdown | None
) -> SimulatedService:
    """With the batch that is planned."""
    return SimulatedService(
        times=basis.times,
        size=replace(predictor.size, max_batch_size=predictor.batch_limit),
        kv_bytes_per_token=basis.kv_bytes_per_token,
        link_bytes_per_s=basis.link_bytes_per_s,
        num_prefill=num_prefill,
        num_decode=num_decode,
        slowdown=slowdown or Slowdown(),
        mixes_prompts=basis.worker.device != "cuda",
    )


def enough_requests(predictor: Predictor, predicted: Prediction) -> int:
    """So many that the service is full for several times as long as an answer takes."""
    traffic = predictor.traffic
    answer_s = predicted.ttft_s[50.0] + predicted.itl_s[50.0] * float(traffic.decoded_tokens.mean())
    under_way = traffic.rate_per_s * answer_s
    return min(MOST_REQUESTS, max(LEAST_REQUESTS, math.ceil(_REQUESTS_A_PLACE * under_way)))


def verify_plan(service: SimulatedService, predictor: Predictor, run: Run) -> VerifiedPlan:
    """From the closed forms' numbers, which `service` has, to the least that keep the targets by
    the simulation. All trials have the same requests.

    Raises:
        ValueError: it finds none.
    """
    traffic, targets = predictor.traffic, predictor.targets

    def strain(num_prefill: int, num_decode: int) -> float:
        tried = replace(service, num_prefill=num_prefill, num_decode=num_decode)
        return simulate(tried, traffic, run, targets, stops_early=True).strain(targets)

    start = service.num_prefill, service.num_decode
    count, is_least = 0, sum(start) <= MAX_SEARCHED
    if is_least:
        most = math.ceil(_MORE * sum(start)) + 2
        found, count = smallest_by_trial(strain, start, most)
        if found is None:
            raise ValueError(
                f"the simulation misses the targets with up to {most} workers, where closed forms "
                f"say {start[0]} prefill + {start[1]} decode"
            )
        service = replace(service, num_prefill=found[0], num_decode=found[1])
    result = simulate(service, traffic, run, targets)
    return VerifiedPlan(service.num_prefill, service.num_decode, result, count + 1, is_least)
