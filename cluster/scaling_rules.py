"""Scaling rules: how many workers a pool needs. Pure: of one moment, without a clock or memory.

A rule answers with a size and one line of reason. When to believe it is the Autoscaler's: see there
for holds, cool-down, ranges and flips. Each rule leaves a gap between the load at which it asks for
one more and the load at which it could spare one again, so that neither step undoes the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.cluster.autoscale_options import duration_text

if TYPE_CHECKING:
    from legato.cluster.pool_pressure import DecodePressure, PoolSize, PrefillPressure

MAX_GROWTH = 2  # a pool at most doubles in one step: what a queue says of the future is little
# Prefill. What waits may take this share of the TTFT goal; computing the prompt takes the rest.
QUEUE_SHARE = 0.5
CATCH_UP_S = 10.0  # within which a bigger pool is to have worked off what waits
BUSY_GOAL = 0.8  # of the workers' time in steps, once the queue is worked off
BUSY_UP = 0.4  # above it, a missed TTFT goal is for want of workers; below, of long prompts
TTFT_DOWN = 0.6  # of the goal: with a TTFT below it,
BUSY_DOWN = 0.6  # the ones left may be so busy;
BUSY_DOWN_LATE = 0.3  # with one above it, so much: less than what would call for one more
# Decode.
FILL_UP = 0.85  # of the KV blocks
FILL_GOAL = 0.75  # after a step up
FILL_DOWN = 0.5  # that the ones left would have to be below
ITL_DOWN = 0.6  # of the goal: what the ITL must stay below with larger batches, see `decide_decode`


@dataclass(frozen=True)
class Need:
    """How many workers would do, and why, in figures."""

    workers: int
    reason: str


def decide_prefill(now: PrefillPressure, ttft_slo_s: float) -> Need:
    """P from queued prompt tokens over measured speed.

    With W tokens waiting (queues and workers), v tokens/s of one worker and n ready ones, the last
    of them waits W / (n·v) seconds. Above half of the TTFT goal the pool needs

        max(n + 1, busy / 0.8 + W / (10 s · v)),   at most 2 n:

    enough for what comes (`busy`: as many workers as were busy all the time, of late) at 80 %
    load, and for what waits to be gone within 10 s. One more where the TTFT (p90) misses its goal
    with the workers over 40 % busy. As few as would be under 60 % busy (30 % where the TTFT is
    above 60 % of its goal) and would keep W within a quarter of the goal.
    """
    ready, speed = now.size.ready, now.worker_tokens_per_s
    if not ready:
        return Need(now.size.target, "no worker is ready")
    if not speed:
        return Need(ready, f"{now.waiting_tokens:,} prompt tokens wait, no speed is measured yet")
    wait_s = now.waiting_tokens / (ready * speed)
    allowed_s = QUEUE_SHARE * ttft_slo_s
    queue = (
        f"{now.waiting_tokens:,} prompt tokens wait, {ready * speed:,.0f} tokens/s measured: "
        f"{duration_text(wait_s)}"
    )
    busy = f"{100 * now.busy_workers / ready:.0f} % busy"
    goal = f"the TTFT goal of {duration_text(ttft_slo_s)}"
    if wait_s > allowed_s:
        workers = now.busy_workers / BUSY_GOAL + now.waiting_tokens / (CATCH_UP_S * speed)
        return Need(_more(ready, workers), f"{queue}, above half of {goal}")
    ttft_s = now.ttft_p90_s
    ttft = "" if ttft_s is None else f"TTFT (p90) {duration_text(ttft_s)}"
    if ttft_s is not None and ttft_s > ttft_slo_s and now.busy_workers > BUSY_UP * ready:
        return Need(ready + 1, f"{ttft}, above {goal}, workers {busy}")
    quick = ttft_s is None or ttft_s <= TTFT_DOWN * ttft_slo_s
    busy_down = BUSY_DOWN if quick else BUSY_DOWN_LATE
    enough = max(
        1,
        math.ceil(now.busy_workers / busy_down),
        math.ceil(now.waiting_tokens / (speed * allowed_s / 2)),
    )
    if enough < ready:
        return Need(enough, f"{queue}, workers {busy}")
    return Need(ready, f"{queue}, workers {busy}{ttft and ', '}{ttft}")


def decide_decode(now: DecodePressure, itl_slo_s: float) -> Need:
    """D from KV blocks and ITL.

    With u blocks in use (held, promised, swapped out), w wanted by requests that wait for room,
    and b of each of n workers: above (u + w) / (n·b) = 85 %, or while anyone waits for room, the
    pool needs

        max(n + 1, (u + w) / (0.75·b)),   at most 2 n.

    One more where the mean ITL misses its goal, unless each worker runs one sequence at most: then
    batches cannot get smaller. As few as would be under 50 % full, with the ITL under 60 % of
    its goal even if it grew as much as the batches do. That is not quite the worst: answers that
    take longer stay longer, and batches grow once more; hence no more than 60 %.
    """
    size = now.size
    ready = size.ready
    if not ready:
        return Need(size.target, "no worker is ready")
    if not now.total_blocks:
        return Need(ready, "no worker has reported its KV blocks yet")
    needed = now.used_blocks + now.waiting_blocks
    each = now.total_blocks / ready
    kv = f"{100 * needed / now.total_blocks:.0f} % of {now.total_blocks:,} KV blocks needed"
    if now.waiting_requests:
        return Need(
            _more(ready, needed / (FILL_GOAL * each)),
            f"{now.waiting_requests:,} requests wait for room, {kv}",
        )
    if needed > FILL_UP * now.total_blocks:
        return Need(_more(ready, needed / (FILL_GOAL * each)), f"{kv}, above {FILL_UP:.0%}")
    itl = "" if now.itl_s is None else f"ITL {duration_text(now.itl_s)}"
    goal = f"the ITL goal of {duration_text(itl_slo_s)}"
    crowded = now.running > ready
    if now.itl_s is not None and now.itl_s > itl_slo_s:
        if crowded:
            batch = f"{now.running / ready:.1f} sequences a worker"
            return Need(ready + 1, f"{itl}, above {goal}, {batch}")
        return Need(
            ready, f"{itl}, above {goal}, but no worker runs more than one sequence: no more help"
        )
    enough = max(1, math.ceil(needed / (FILL_DOWN * each)))
    if now.itl_s is not None and crowded:
        enough = max(enough, math.ceil(ready * now.itl_s / (ITL_DOWN * itl_slo_s)))
    enough = min(enough, ready)
    return Need(enough, f"{kv}{itl and ', '}{itl}")


def _more(ready: int, workers: float) -> int:
    return min(max(ready + 1, math.ceil(workers)), MAX_GROWTH * ready)


def size_text(size: PoolSize) -> str:
    """For a reason: 2 of 3 ready, 1 starting."""
    starting = f", {size.starting} starting" if size.starting else ""
    return f"{size.ready} of {size.target} ready{starting}"
