"""Result: what a simulated service was like, and what it would have run out of first."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.plan.prediction import PERCENTS

if TYPE_CHECKING:
    from legato.plan.simulation.cluster import SimulatedCluster
    from legato.plan.simulation.measures import Estimate
    from legato.plan.simulation.setup import Run
    from legato.plan.targets import Targets
    from legato.plan.traffic import Traffic

# Of one core, as measured (docs/benchmarks.md): a short stream, less its two tokens; and a token.
ROUTER_REQUEST_S = 0.003
ROUTER_TOKEN_S = 0.0002
# The measured time is to be so many times as long as an answer takes.
_LONG_ENOUGH = 3.0


@dataclass(frozen=True)
class Result:
    """Shares are of the time that was measured; `*_s` by percent, in seconds."""

    num_requests: int
    seed: int
    measured_s: float
    measured_requests: int
    refused: int
    ttft_s: dict[float, Estimate]
    itl_s: dict[float, Estimate]
    e2e_s: dict[float, Estimate]
    ttft_mean_s: Estimate
    e2e_mean_s: float
    output_tokens_per_s: float
    prefill_busy: float
    decode_busy: float
    batch_mean: float  # sequences of a decode worker
    batch_share: float  # of the largest batch
    kv_share: float  # of decode workers' blocks, those held
    link_bytes_per_s: float  # of all prefill workers together
    link_busy: float  # of the busiest link
    router_busy: float  # of one core for each router
    preemptions: int
    limited_by: str
    is_long_enough: bool
    is_cut: bool  # the TTFT target was missed clearly, and the rest was not simulated

    def strain(self, targets: Targets) -> float:
        """The worse of both percentiles over its target: up to 1 where these are kept."""
        if self.is_cut:
            return math.inf
        percent = targets.percent
        return max(
            self.ttft_s[percent].value / targets.ttft_s, self.itl_s[percent].value / targets.itl_s
        )

    def as_json(self) -> dict[str, object]:
        """Plain values; the same bytes for the same simulation."""
        found: dict[str, object] = {}
        for name, value in vars(self).items():
            if isinstance(value, dict):
                found[name] = {f"p{p:g}": estimate.as_json() for p, estimate in value.items()}
            elif isinstance(value, float):
                found[name] = round(value, 6)
            else:
                found[name] = value if isinstance(value, int | str) else value.as_json()
        return found

    def text(self) -> str:
        """One line of JSON."""
        return json.dumps(self.as_json(), allow_nan=False)


def make_result(
    cluster: SimulatedCluster, run: Run, traffic: Traffic, targets: Targets | None
) -> Result:
    """After the run."""
    measures, service = cluster.measures, cluster.service
    seconds = measures.ends_s - measures.begins_s
    percents = sorted({*PERCENTS, *(() if targets is None else (targets.percent,))})
    prefills, decodes = cluster.prefill.values(), cluster.decode.values()
    links = [w.link.busy_s for w in prefills] + [w.link.busy_s for w in decodes]
    batch_mean = sum(w.sequence_s for w in decodes) / seconds / len(decodes)
    tokens_per_s = measures.num_tokens / seconds + traffic.rate_per_s
    shares = {
        "prefill: computing prompts": sum(w.busy_s for w in prefills) / seconds / len(prefills),
        "decode: the largest batch": batch_mean / service.size.max_batch_size,
        "decode: KV memory": sum(w.held_block_s for w in decodes)
        / seconds
        / len(decodes)
        / service.num_blocks,
        "links": max(links) / seconds,
        "routers": (traffic.rate_per_s * ROUTER_REQUEST_S + tokens_per_s * ROUTER_TOKEN_S)
        / service.num_routers,
    }
    e2e_mean_s = measures.e2e_mean()
    return Result(
        num_requests=run.num_requests,
        seed=run.seed,
        measured_s=seconds,
        measured_requests=run.end_measured - run.first_measured,
        refused=measures.num_refused,
        ttft_s={p: measures.ttft(p) for p in percents},
        itl_s={p: measures.itl(p) for p in percents},
        e2e_s={p: measures.e2e(p) for p in percents},
        ttft_mean_s=measures.ttft_mean(),
        e2e_mean_s=e2e_mean_s,
        output_tokens_per_s=tokens_per_s,
        prefill_busy=shares["prefill: computing prompts"],
        decode_busy=sum(w.busy_s for w in decodes) / seconds / len(decodes),
        batch_mean=batch_mean,
        batch_share=shares["decode: the largest batch"],
        kv_share=shares["decode: KV memory"],
        link_bytes_per_s=cluster.links.num_bytes / seconds,
        link_busy=shares["links"],
        router_busy=shares["routers"],
        preemptions=sum(w.num_preemptions for w in decodes),
        limited_by=max(shares, key=lambda name: shares[name]),
        is_long_enough=seconds >= _LONG_ENOUGH * e2e_mean_s,
        is_cut=measures.ttft_missed.is_set(),
    )
