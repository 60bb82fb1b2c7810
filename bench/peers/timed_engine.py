"""timed_engine: the loops around an engine that is driven step by step in this process.

It runs within a peer's environment beside host.py, which loads it: standard library alone. Such an
engine has no server, and no client, to share its cores with: that favours it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol


class StepEngine(Protocol):
    """What a runner offers for it."""

    def add(self, prompt: list[int], max_tokens: int) -> int:
        """Queues a request, greedy and to the last token; returns its number."""
        ...

    def step(self) -> list[tuple[int, list[int]]]:
        """Runs one step, or waits for one, at most some ms: new tokens, by request."""
        ...

    def cancel(self, number: int) -> None:
        """Ends a request, which may have ended by itself."""
        ...


def run_closed(
    engine: StepEngine, prompts: list[list[int]], num_at_once: int, max_tokens: int
) -> dict[str, Any]:
    """A request is added whenever a place is free; what host.py's `run` answers."""
    waiting = deque(enumerate(prompts))
    requests: list[dict[str, Any]] = [{"token_times_s": [], "token_ids": []} for _ in prompts]
    under_way: dict[int, dict[str, Any]] = {}
    while waiting or under_way:
        while waiting and len(under_way) < num_at_once:
            index, prompt = waiting.popleft()
            requests[index]["sent_s"] = time.perf_counter()
            under_way[engine.add(prompt, max_tokens)] = requests[index]
        for number, token_ids in engine.step():
            request = under_way[number]
            request["token_ids"] += token_ids
            request["token_times_s"] += [time.perf_counter()] * len(token_ids)
            if len(request["token_ids"]) >= max_tokens:
                del under_way[number]
    return {"requests": requests}


def run_phase(engine: StepEngine, plan: dict[str, Any]) -> dict[str, Any]:
    """A phase of interference. `plan` is a PhasePlan, the answer a PhaseRecord, as plain values."""
    began_s = time.perf_counter()
    streams: list[dict[str, list[Any]]] = [{"times_s": [], "counts": []} for _ in plan["streams"]]
    prompts: list[dict[str, list[Any]]] = [{"times_s": [], "counts": []} for _ in plan["prompts"]]
    deliveries = {
        engine.add(prompt, plan["stream_answer_tokens"]): record
        for prompt, record in zip(plan["streams"], streams, strict=True)
    }
    coming = deque(zip(plan["dues_s"], plan["prompts"], prompts, strict=True))
    begin_s: float | None = None  # of the window
    while True:
        now_s = time.perf_counter() - began_s
        if begin_s is None:
            if all(stream["times_s"] for stream in streams):
                begin_s = max(stream["times_s"][0] for stream in streams) + plan["settle_s"]
            elif now_s >= plan["begin_timeout_s"]:
                break
        while begin_s is not None and coming and begin_s + coming[0][0] <= now_s:
            _, prompt, record = coming.popleft()
            deliveries[engine.add(prompt, plan["answer_tokens"])] = record
        if begin_s is not None and (late_s := now_s - begin_s - plan["window_s"]) >= 0:
            answered = all(prompt["times_s"] for prompt in prompts)
            if answered or late_s >= plan["drain_s"]:
                break
        for number, token_ids in engine.step():
            record = deliveries[number]
            record["times_s"].append(time.perf_counter() - began_s)
            record["counts"].append(len(token_ids))
    ended_s = time.perf_counter() - began_s
    for number in deliveries:
        engine.cancel(number)
    return {"streams": streams, "prompts": prompts, "begin_s": begin_s, "ended_s": ended_s}
