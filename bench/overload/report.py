"""What an overload run measured, as the JSON line, and what of it is not as it must be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from legato.bench.overload.outcome import End

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from legato.bench.overload.loops import Flood
    from legato.bench.overload.outcome import Outcome

LEAST_OFFERED = 0.97  # of the load that was named; below, the run says nothing
MOST_DELAY_S = 0.25  # p99 of an arrival behind its time
LEAST_GOODPUT = 0.9  # of the peak
MOST_REFUSAL_S = 0.05  # p99, from the call's arrival
MOST_RECOVERY_S = 5.0
MOST_GROWTH = 1.05  # of resident memory from a quarter of the flood to its end


def quantile(values: Sequence[float], share: float) -> float | None:
    """The least value that `share` of them do not exceed; None of none."""
    if not values:
        return None
    return round(sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)], 5)


def finished(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """Of those that did: when, and how many tokens they had."""
    return [(o.ended_s, o.num_tokens) for o in outcomes if o.end is End.FINISHED]


def rate_within(
    done: Sequence[tuple[float, int]], begin_s: float, end_s: float
) -> dict[str, float]:
    """Requests, and their tokens, that finished in that time, a second."""
    within = [num_tokens for ended_s, num_tokens in done if begin_s <= ended_s < end_s]
    seconds = end_s - begin_s
    return {"requests_s": len(within) / seconds, "tokens_s": sum(within) / seconds}


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Count, median and p99."""
    return {"count": len(values), "p50": quantile(values, 0.5), "p99": quantile(values, 0.99)}


def flood_report(flood: Flood) -> dict[str, object]:
    """Of the load generator's own requests."""
    refused = [o for o in flood.outcomes if o.end is End.REFUSED]
    ends = {
        priority: {
            end.value: sum(o.end is end and o.batch == batch for o in flood.outcomes) for end in End
        }
        for priority, batch in (("interactive", False), ("batch", True))
    }
    return {
        "offered_rate": round(flood.offered_rate, 2),
        "arrival_delay_s": spread(flood.delays_s),
        "ends": ends,
        "refusal_s": spread([o.latency_s for o in refused]),
        "refusal_router_s": spread([o.server_s for o in refused if o.server_s is not None]),
        # Let in, and given up while they waited.
        "refused_late": sum(o.latency_s > 1.0 for o in refused),
        "refused_without_hint": sum(o.hint_ms is None for o in refused),
        "failures": sorted({o.text for o in flood.outcomes if o.end is End.FAILED})[:5],
    }


def faults(report: Mapping[str, object], named_rate: float) -> tuple[list[str], list[str]]:
    """Why the run is invalid, and what is not as it must be; both empty where all is well."""
    flood, probe = _part(report, "flood"), _part(report, "probe")
    invalid, wrong = [], []
    offered, delay_s = float(str(flood["offered_rate"])), _p99(flood, "arrival_delay_s")
    if offered < LEAST_OFFERED * named_rate:
        invalid.append(f"{offered:.1f} requests/s were sent where {named_rate:.1f} were named")
    if delay_s is None or delay_s > MOST_DELAY_S:
        invalid.append(f"arrivals were {delay_s} s behind their time (p99)")
    ratio = float(str(report["goodput_ratio"]))
    if ratio < LEAST_GOODPUT:
        wrong.append(f"goodput is {ratio:.2f} of the peak")
    for who, part in (("the probe", probe), ("the flood", flood)):
        router_s = _p99(part, "refusal_router_s")
        if router_s is None or router_s > MOST_REFUSAL_S:
            wrong.append(f"refusals to {who} took {router_s} s in the router (p99)")
    # Clients share the machine with the service they flood: what a call that does nothing waits
    # for a processor is no fault of a refusal.
    refusal_s, idle_s = _p99(probe, "refusal_s"), _p99(probe, "idle_call_s") or 0.0
    if refusal_s is not None and refusal_s > MOST_REFUSAL_S + idle_s:
        wrong.append(f"refusals took {refusal_s} s (p99), an empty call {idle_s} s")
    hintless = int(str(flood["refused_without_hint"])) + int(str(probe["without_hint"]))
    if hintless:
        wrong.append(f"{hintless} refusals had no hint")
    if flood["failures"]:
        wrong.append(f"requests failed: {flood['failures']}")
    recovery_s = report["recovery_s"]
    if not isinstance(recovery_s, float) or recovery_s > MOST_RECOVERY_S:
        wrong.append(f"back to normal after {recovery_s} s")
    for name, growth in _part(report, "memory_growth").items():
        if float(str(growth)) > MOST_GROWTH:
            wrong.append(f"{name} grew to {growth} times its memory")
    return invalid, wrong


def _part(report: Mapping[str, object], name: str) -> Mapping[str, object]:
    part = report[name]
    assert isinstance(part, dict), "made here"
    return part


def _p99(part: Mapping[str, object], name: str) -> float | None:
    value = _part(part, name)["p99"]
    assert value is None or isinstance(value, float), "made here"
    return value
