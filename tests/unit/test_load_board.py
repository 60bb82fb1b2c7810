from __future__ import annotations

from dataclasses import replace

import pytest

from legato.cluster.load_board import LoadBoard
from legato.cluster.load_window import LoadWindow, TokenGaps, WindowFigures
from legato.cluster.pool_pressure import PoolSize
from legato.cluster.router_load import RouterLoad, WorkerFigures

ONE = PoolSize(1, 1)
NOTHING = WindowFigures()


def test_a_window_forgets_after_ten_seconds() -> None:
    window = LoadWindow()
    assert window.close_slot(0.0) == NOTHING
    for ttft_s in range(1, 11):
        window.note_first_token(ttft_s / 10)
    window.note_tokens(0.2, 4)
    window.note_tokens(0.1, 1)
    figures = window.close_slot(1.0)
    assert (figures.num_first_tokens, figures.ttft_p90_s) == (10, 1.0)
    assert (figures.num_tokens, figures.itl_mean_s) == (5, pytest.approx(0.06))
    window.note_tokens(0.5, 5)
    assert window.close_slot(10.5).itl_mean_s == pytest.approx(0.08)
    assert window.close_slot(11.5) == WindowFigures(num_tokens=5, itl_mean_s=0.1)
    assert window.close_slot(20.6) == NOTHING


def test_gaps_that_a_slow_client_made_do_not_count() -> None:
    window = LoadWindow()
    gaps = TokenGaps(window, 10.0)
    gaps.arrived(0, 1, 10.1)
    gaps.delivered(10.101)
    gaps.arrived(0, 2, 10.3)  # two tokens in 0.2 s
    gaps.delivered(12.3)  # the client did not read for two seconds
    gaps.arrived(0, 1, 12.31)
    gaps.delivered(12.32)
    gaps.arrived(1, 1, 12.4)  # another answer of the call, held up as well
    figures = window.close_slot(13.0)
    assert (figures.num_tokens, figures.itl_mean_s) == (3, pytest.approx(0.1))


def test_routers_add_up_and_a_silent_one_is_dropped() -> None:
    board = LoadBoard()
    assert not board.hears(0.0)
    worker = WorkerFigures("d", "decode", 0, 100, 40, 7)
    first = RouterLoad(
        "a", WindowFigures(1, 0.2, 10, 0.01), queued_for_decode=2, queued_decode_blocks=9,
        queued_for_prefill=1, queued_prefill_tokens=70, workers=(worker,),
    )  # fmt: skip
    second = replace(first, router_id="b", window=WindowFigures(3, 0.6, 30, 0.05))
    board.note(first, 0.0)
    board.note(replace(second, workers=(replace(worker, used_blocks=50),)), 0.5)
    decode = board.decode(ONE, ("d",), 1.0)
    assert (decode.waiting_requests, decode.waiting_blocks) == (4, 18)
    assert (decode.used_blocks, decode.total_blocks, decode.running) == (50, 100, 7)
    assert decode.itl_s == pytest.approx(0.04)
    assert decode.idlest == "d"
    prefill = board.prefill(ONE, (), 1.0)
    assert (prefill.waiting_requests, prefill.waiting_tokens) == (2, 140)
    assert prefill.ttft_p90_s == pytest.approx(0.5)
    assert board.decode(ONE, ("d",), 5.2).waiting_requests == 2
    assert board.hears(5.2)
    assert not board.hears(5.6)
    assert board.decode(ONE, ("d",), 5.6).itl_s is None


def report(at_s: float, *workers: tuple[str, int, float, int], router: str = "a") -> RouterLoad:
    """(id, tokens computed, seconds in steps, tokens that wait) of prefill workers."""
    return RouterLoad(
        router,
        NOTHING,
        workers=tuple(
            WorkerFigures(name, "prefill", waiting, 0, 0, 0, tokens, model_s)
            for name, tokens, model_s, waiting in workers
        ),
    )


def test_speed_and_busy_share_come_of_the_workers_counters() -> None:
    board = LoadBoard()
    board.note(report(0.0, ("p", 1000, 5.0, 0), ("q", 0, 0.0, 0)), 0.0)
    assert board.prefill(PoolSize(2, 2), ("p", "q"), 0.0).worker_tokens_per_s is None
    board.note(report(2.0, ("p", 5000, 6.0, 300), ("q", 2000, 0.5, 100)), 2.0)
    # A report of an earlier moment, over another router, takes nothing back.
    board.note(report(2.0, ("p", 3000, 5.5, 50), router="b"), 2.0)
    now = board.prefill(PoolSize(2, 2), ("p", "q"), 2.0)
    assert now.worker_tokens_per_s == pytest.approx(6000 / 1.5)
    assert now.busy_workers == pytest.approx(0.75)
    assert (now.waiting_tokens, now.idlest) == (450, "q")
    # One that drains counts no more; what is known of the speed stays when nobody computes.
    now = board.prefill(ONE, ("q",), 2.0)
    assert (now.waiting_tokens, now.busy_workers) == (100, pytest.approx(0.25))
    for at_s in (10.0, 13.0, 20.0):
        board.note(report(at_s, ("q", 2000, 0.5, 0)), at_s)
    now = board.prefill(ONE, ("q",), 20.0)
    assert now.busy_workers == 0.0
    assert now.worker_tokens_per_s == pytest.approx(4000)


def test_a_step_longer_than_the_window_is_no_more_than_all_the_time() -> None:
    board = LoadBoard()
    board.note(report(0.0, ("p", 0, 0.0, 0)), 0.0)
    board.note(report(1.0, ("p", 9000, 30.0, 0)), 1.0)
    now = board.prefill(ONE, ("p",), 1.0)
    assert (now.busy_workers, now.worker_tokens_per_s) == (1.0, pytest.approx(300))
