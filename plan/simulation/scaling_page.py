"""scaling_page: docs/scaling.md, from simulated and measured rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from legato.plan.simulation.result import ROUTER_REQUEST_S, ROUTER_TOKEN_S
from legato.worker.services.control import REPORT_EVERY_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.plan.simulation.scaling import Row

INTERNET_RATE = 1e5  # requests a second
ROUTER_FILL = 0.6  # of a core, that a router is planned to use

_HEAD = """# Scaling

What limits a service as it grows: the router, the links, or the pools? This page is written by

```sh
make docs-scaling
```

from the simulation that [planning.md](planning.md#the-simulation) describes: the production router
and schedulers in virtual time. **Step times are those of a datasheet (H100, 8 billion weights of
16 bit, 100 Gbit/s for each worker), not measured**; what routers cost in processor time is.
Prompts are `lognormal:800:0.8:8000`, answers `lognormal:60:0.7:500` tokens; three workers in eight
do prefill, and requests come at 70 % of what these can compute.

## 2 to 256 workers, one router's queue

"""
_NOTE = """
*Placing*: processor time of the production queue and policies for one request, all workers idle,
measured where this page was written, on {machine}, beside other work. *Router cores*: requests ×
{request_ms:g} ms + tokens × {token_ms:g} ms, by [benchmarks.md](benchmarks.md#access); in the
simulation routers take no time.

Nothing in the pools gets worse with their number: latencies stay, and a larger pool has a free
worker more often. (p99 of TTFT jumps between the times of the longest prompts that are drawn.)
What grows is the work of routers.
"""
_ROUTED_NOTE = """
**That is what several routers cost**: they do not know what the others have given out since the
last report, and choose alike, so that prompts meet at one prefill worker while others are idle.
Decode hardly feels it. As many routers as their processors need, and no more.
"""
_END = """
These are multiples of the last row above, not a simulation of so many workers; a balancer that
sends each service its even share is taken for granted.
"""

_COLUMNS = (
    "workers",
    "requests/s",
    "TTFT p50, p99 ms",
    "ITL p50, p99 ms",
    "prefill busy",
    "batch",
    "KV held",
    "busiest link",
    "KV Gbit/s in all",
    "router cores",
    "placing, ms of CPU",
    "simulated requests/s of CPU",
)
_ROUTED_COLUMNS = (
    "routers",
    "requests/s",
    "TTFT p50, p99 ms",
    "ITL p99 ms",
    "refused",
    "cores of each",
)


def scaling_page(rows: Sequence[Row], routed: Sequence[Row], machine: str) -> str:
    """The whole text."""
    note = _NOTE.format(
        machine=machine, request_ms=1e3 * ROUTER_REQUEST_S, token_ms=1e3 * ROUTER_TOKEN_S
    )
    return "\n".join(
        [
            _HEAD + _table(_COLUMNS, [_cells(row) for row in rows]),
            note,
            f"## Several routers over {routed[0].num_prefill + routed[0].num_decode} workers",
            "",
            "Each has its own queue, and a view of the same workers that is up to 50 ms old.",
            "",
            _table(_ROUTED_COLUMNS, [_routed_cells(row) for row in routed]),
            _ROUTED_NOTE,
            "",
            f"## {INTERNET_RATE:,.0f} requests a second",
            "",
            _internet(rows[-1]) + _END,
        ]
    )


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Row) -> list[str]:
    result = row.result
    ttft, itl = result.ttft_s, result.itl_s
    return [
        f"{row.num_prefill}+{row.num_decode}",
        f"{row.rate_per_s:,.0f}",
        f"{_ms(ttft[50.0].value)}, {_ms(ttft[99.0].value)} ± {_ms(ttft[99.0].half_width)}",
        f"{_ms(itl[50.0].value)}, {_ms(itl[99.0].value)}",
        f"{100 * result.prefill_busy:.0f} %",
        f"{result.batch_mean:.1f}",
        f"{100 * result.kv_share:.1f} %",
        f"{100 * result.link_busy:.0f} %",
        f"{result.link_bytes_per_s * 8e-9:,.0f}",
        f"{result.router_busy:.1f}",
        f"{1e3 * row.placing_cpu_s:.2f}",
        f"{result.num_requests / row.simulation_cpu_s:,.0f}",
    ]


def _routed_cells(row: Row) -> list[str]:
    result = row.result
    ttft = result.ttft_s
    return [
        str(row.num_routers),
        f"{row.rate_per_s:,.0f}",
        f"{_ms(ttft[50.0].value)}, {_ms(ttft[99.0].value)} ± {_ms(ttft[99.0].half_width)}",
        _ms(result.itl_s[99.0].value),
        str(result.refused),
        f"{result.router_busy:.1f}",
    ]


def _internet(last: Row) -> str:
    """Multiples of the largest service that was simulated."""
    num_workers = last.num_prefill + last.num_decode
    services = math.ceil(INTERNET_RATE / last.rate_per_s)
    tokens = last.result.output_tokens_per_s / last.rate_per_s
    request_s = ROUTER_REQUEST_S + tokens * ROUTER_TOKEN_S
    routers = math.ceil(INTERNET_RATE * request_s / ROUTER_FILL)
    each = math.ceil(routers / services)
    reports = num_workers / REPORT_EVERY_S
    kv_tbit = last.result.link_bytes_per_s * 8e-12
    cells = [
        [
            "routers",
            f"{routers:,} processes",
            f"**first**: {1 / request_s:.0f} requests/s of a core",
            "They share nothing but the workers: as many as are wanted, on any nodes, behind any "
            "balancer (`--routers`), at the cost in TTFT above. Passing on tokens is most of their "
            "work, not placing",
        ],
        [
            "a router's view of workers",
            f"{services * reports:,.0f} reports/s to each router, were all of it one service",
            f"{reports:,.0f} reports/s in a service of {num_workers} workers",
            f"{services} services of {num_workers} workers, each with {each} routers of its own; a "
            "balancer in front spreads requests over them",
        ],
        [
            "placing",
            f"{1e3 * last.placing_cpu_s:.1f} ms a request among {num_workers} workers",
            f"{1 / last.placing_cpu_s:,.0f} requests/s a router",
            f"It grows with the workers of one service, and is spread over its {each} routers",
        ],
        [
            "links",
            f"{services * kv_tbit:,.0f} Tbit/s of KV in all, {kv_tbit:.1f} in a service",
            f"each worker's own link: the busiest is so {100 * last.result.link_busy:.0f} % of "
            "the time",
            "KV goes from worker to worker, never through a router or Ray, never between services",
        ],
        [
            "pools",
            f"{services * last.num_prefill:,} prefill + {services * last.num_decode:,} decode "
            "workers",
            f"prefill is busy {100 * last.result.prefill_busy:.0f} % of the time",
            "They scale apart, in proportion to the traffic: no worker knows of the others",
        ],
        [
            "controllers",
            f"{services}, one a service",
            "they see targets and states, no request",
            "Nothing on a token's way needs them "
            "([architecture.md](architecture.md#when-what-steers-is-lost))",
        ],
    ]
    return (
        f"At {tokens:.0f} tokens an answer a request costs a router {1e3 * request_s:.0f} ms of a "
        f"core: {ROUTER_FILL / request_s:.0f} requests/s at {100 * ROUTER_FILL:.0f} % of it.\n\n"
        + _table(("resource", "needed", "limit", "what the design does"), cells)
        + "\n"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
