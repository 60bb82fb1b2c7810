from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from legato.cluster.pool_pressure import DecodePressure, PoolSize, PrefillPressure
from legato.cluster.scaling_rules import decide_decode, decide_prefill

TWO = PoolSize(target=2, ready=2)
PREFILL = PrefillPressure(TWO, worker_tokens_per_s=1000.0)
DECODE = DecodePressure(TWO, total_blocks=2000)


def test_prompts_that_wait_longer_than_half_of_the_goal_call_for_more() -> None:
    at_rest = replace(PREFILL, waiting_tokens=500, busy_workers=1.5)
    assert decide_prefill(at_rest, 0.5).workers == 2  # 250 ms: not above the half
    need = decide_prefill(replace(at_rest, waiting_tokens=520), 0.5)
    assert need.workers == 3
    assert need.reason == (
        "520 prompt tokens wait, 2,000 tokens/s measured: 260 ms, "
        "above half of the TTFT goal of 500 ms"
    )


def test_a_long_queue_is_to_be_gone_in_ten_seconds_but_the_pool_at_most_doubles() -> None:
    full = replace(PREFILL, busy_workers=2.0)
    # 2 / 0.8 for what comes, and 1 for 10,000 tokens within 10 s.
    assert decide_prefill(replace(full, waiting_tokens=10_000), 0.5).workers == 4
    assert decide_prefill(replace(full, waiting_tokens=1_000_000), 0.5).workers == 4
    assert decide_prefill(replace(full, waiting_tokens=4_000), 0.5).workers == 3


def test_a_missed_ttft_calls_for_more_only_where_workers_are_busy() -> None:
    late = replace(PREFILL, ttft_p90_s=0.9, busy_workers=1.6)
    need = decide_prefill(late, 0.5)
    assert (need.workers, need.reason) == (
        3,
        "TTFT (p90) 900 ms, above the TTFT goal of 500 ms, workers 80 % busy",
    )
    # Long prompts on workers that are not: another worker makes none of them shorter.
    assert decide_prefill(replace(late, busy_workers=0.79), 0.5).workers == 2
    assert decide_prefill(replace(late, busy_workers=0.31), 0.5).workers == 2
    assert decide_prefill(replace(late, busy_workers=0.29), 0.5).workers == 1
    # The same with a goal that is met, though not by far.
    assert decide_prefill(replace(late, ttft_p90_s=0.31, busy_workers=0.31), 0.5).workers == 2
    assert decide_prefill(replace(late, ttft_p90_s=0.29, busy_workers=0.59), 0.5).workers == 1


def test_prefill_shrinks_to_what_would_not_be_too_busy() -> None:
    eight = replace(PREFILL, size=PoolSize(8, 8))
    assert decide_prefill(replace(eight, busy_workers=1.8), 0.5).workers == 3
    assert decide_prefill(eight, 0.5).workers == 1
    assert decide_prefill(replace(eight, waiting_tokens=500), 0.5).workers == 4


def test_without_a_speed_or_a_worker_nothing_is_judged() -> None:
    unknown = replace(PREFILL, worker_tokens_per_s=None, waiting_tokens=77)
    need = decide_prefill(unknown, 0.5)
    assert (need.workers, need.reason) == (2, "77 prompt tokens wait, no speed is measured yet")
    assert decide_prefill(replace(unknown, size=PoolSize(3, 0)), 0.5).workers == 3
    assert decide_decode(replace(DECODE, size=PoolSize(3, 0)), 0.05).workers == 3
    assert decide_decode(replace(DECODE, total_blocks=0), 0.05).workers == 2


def test_kv_pressure_calls_for_more_decode() -> None:
    assert decide_decode(replace(DECODE, used_blocks=1700), 0.05).workers == 2
    need = decide_decode(replace(DECODE, used_blocks=1720), 0.05)
    assert (need.workers, need.reason) == (3, "86 % of 2,000 KV blocks needed, above 85%")
    # Whoever waits for room may do so with blocks free: answers are expected to grow.
    waits = replace(DECODE, used_blocks=1300, waiting_requests=3, waiting_blocks=100)
    need = decide_decode(waits, 0.05)
    assert (need.workers, need.reason) == (
        3,
        "3 requests wait for room, 70 % of 2,000 KV blocks needed",
    )
    assert decide_decode(replace(waits, waiting_blocks=90_000), 0.05).workers == 4


def test_a_missed_itl_calls_for_more_unless_batches_cannot_get_smaller() -> None:
    slow = replace(DECODE, itl_s=0.08, running=10)
    need = decide_decode(slow, 0.05)
    assert (need.workers, need.reason) == (
        3,
        "ITL 80 ms, above the ITL goal of 50 ms, 5.0 sequences a worker",
    )
    need = decide_decode(replace(slow, running=2), 0.05)
    assert need.workers == 2
    assert "no worker runs more than one sequence" in need.reason


def test_decode_shrinks_where_neither_memory_nor_itl_would_suffer() -> None:
    four = replace(DECODE, size=PoolSize(4, 4), total_blocks=4000)
    assert decide_decode(four, 0.05).workers == 1
    assert decide_decode(replace(four, used_blocks=1400), 0.05).workers == 3
    # 4 workers at 20 ms: three have batches a third larger, 27 ms at worst, two 40 ms.
    assert decide_decode(replace(four, itl_s=0.02, running=40), 0.05).workers == 3
    assert decide_decode(replace(four, itl_s=0.02, running=4), 0.05).workers == 1


@given(
    ready=st.integers(1, 16),
    waiting=st.integers(0, 1_000_000),
    busy=st.floats(0, 1),
    speed=st.floats(10, 100_000),
    ttft_s=st.none() | st.floats(0.001, 100),
)
def test_prefill_neither_step_undoes_the_other(
    ready: int, waiting: int, busy: float, speed: float, ttft_s: float | None
) -> None:
    now = PrefillPressure(PoolSize(ready, ready), 0, waiting, speed, busy * ready, ttft_s)
    need = decide_prefill(now, 0.5)
    assert 1 <= need.workers <= 2 * ready
    assert need.reason
    assert "\n" not in need.reason
    # The same work on the size that was asked for never asks for the size before.
    again = decide_prefill(replace(now, size=PoolSize(need.workers, need.workers)), 0.5)
    if need.workers < ready:
        assert again.workers <= need.workers
    elif need.workers > ready:
        assert again.workers > ready


@given(
    ready=st.integers(1, 16),
    fill=st.floats(0, 1),
    waiting=st.integers(0, 100),
    running=st.integers(0, 500),
    itl_s=st.none() | st.floats(0.001, 1),
)
def test_decode_neither_step_undoes_the_other(
    ready: int, fill: float, waiting: int, running: int, itl_s: float | None
) -> None:
    used = int(fill * ready * 100)
    now = DecodePressure(
        PoolSize(ready, ready), waiting, waiting, used, ready * 100, running, itl_s
    )
    need = decide_decode(now, 0.05)
    assert 1 <= need.workers <= 2 * ready
    assert need.reason
    assert "\n" not in need.reason
    # An ITL that follows the batch all the way is the worst that another size can do to it.
    scale = ready / need.workers
    then = replace(
        now,
        size=PoolSize(need.workers, need.workers),
        total_blocks=need.workers * 100,
        itl_s=None if itl_s is None else itl_s * scale,
        # Those who waited are in.
        waiting_requests=0,
        waiting_blocks=0,
        used_blocks=used + waiting,
    )
    again = decide_decode(then, 0.05)
    if need.workers < ready:
        assert again.workers <= need.workers
    elif need.workers > ready and not waiting:
        assert again.workers > ready
