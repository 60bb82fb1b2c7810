"""Records of phases with streams and prompts, as the interference benchmark makes them."""

from __future__ import annotations

from typing import Any

from legato.bench.peers.interference.workload import (
    Deliveries,
    Interference,
    PhasePlan,
    PhaseRecord,
)

SMALL = Interference(
    num_streams=2,
    stream_prompt_tokens=4,
    prompt_tokens=8,
    answer_tokens=2,
    every_s=0.1,
    settle_s=0.05,
    window_s=0.3,
    drain_s=0.5,
    begin_timeout_s=2.0,
)


def plan(**changes: object) -> PhasePlan:
    """Two streams and one prompt, which is due 1 s into a window of 10 s."""
    values: dict[str, Any] = {
        "streams": [[1], [2]],
        "prompts": [[3]],
        "dues_s": [1.0],
        "answer_tokens": 2,
        "settle_s": 1.0,
        "window_s": 10.0,
        "drain_s": 5.0,
        "begin_timeout_s": 5.0,
        "stream_answer_tokens": 1000,
    }
    values.update(changes)
    return PhasePlan(**values)


def steady(until_s: float, every_s: float = 0.1, first_s: float = 0.1) -> Deliveries:
    times = [first_s + i * every_s for i in range(int((until_s - first_s) / every_s))]
    return Deliveries(times, [1] * len(times))


def record(**changes: object) -> PhaseRecord:
    """Of `plan`: the window is 2 to 12 s."""
    values: dict[str, Any] = {
        "streams": [steady(12.1), steady(12.1)],
        "prompts": [Deliveries([3.7, 3.8], [1, 1])],
        "begin_s": 2.0,
        "ended_s": 12.1,
    }
    values.update(changes)
    return PhaseRecord(**values)
