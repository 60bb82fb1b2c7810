"""The window of a link follows what the path moves."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import pytest

from legato.worker.handoff import lanes
from legato.worker.handoff.window import LEAST_BYTES, TARGET_S, Window

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 6 << 20


class Path:
    """Moves bytes at a rate that may change, and answers each chunk one round trip later. Always
    has something to send, unless `pause_s` passes after each chunk.
    """

    def __init__(self, rate: Callable[[float], float], round_trip_s: float = 0.0005) -> None:
        self.window = Window(MOST)
        self.now_s = 0.0
        self.waits_s: list[tuple[float, float]] = []  # (when, from a chunk's sending to its answer)
        self._rate = rate
        self._round_trip_s = round_trip_s
        self._on_way: deque[tuple[int, int, float, float]] = deque()
        self._bytes = 0
        self._free_at_s = 0.0

    def run(self, until_s: float, pause_s: float = 0.0) -> None:
        while self.now_s < until_s:
            chunk = min(lanes.CHUNK_BYTES, self.window.num_bytes // 2)
            while self._bytes + chunk <= self.window.num_bytes:
                self._bytes += chunk
                moved_at_s = max(self._free_at_s, self.now_s)
                self._free_at_s = moved_at_s + chunk / self._rate(moved_at_s)
                answered_at_s = self._free_at_s + self._round_trip_s
                self._on_way.append((chunk, self._bytes, self.now_s, answered_at_s))
                if pause_s:
                    break
            size, on_way, sent_at_s, self.now_s = self._on_way.popleft()
            self._bytes -= size
            self.waits_s.append((self.now_s, self.now_s - sent_at_s))
            self.window.answered(on_way, sent_at_s, self.now_s)
            self.now_s += pause_s


@pytest.mark.parametrize("rate", [0.1e6, 0.4e6, 1e6, 2e6, 4e6, 8e6])
@pytest.mark.parametrize("round_trip_s", [0.0005, 0.05])
def test_what_is_on_the_way_arrives_within_the_time(rate: float, round_trip_s: float) -> None:
    path = Path(lambda _: rate, round_trip_s)
    path.run(20)
    limit_s = max(1.2 * TARGET_S, LEAST_BYTES / rate) + round_trip_s
    assert max(wait_s for _, wait_s in path.waits_s) <= limit_s
    least = max(LEAST_BYTES, 0.8 * TARGET_S * rate / (1 + round_trip_s))
    assert least <= path.window.num_bytes <= max(LEAST_BYTES, TARGET_S * rate)


def test_a_fast_path_has_all_of_it_after_few_round_trips() -> None:
    path = Path(lambda _: 1e9)
    path.run(0.005)
    assert path.window.num_bytes == MOST


def test_it_follows_a_path_that_becomes_slow_and_fast_again() -> None:
    path = Path(lambda now_s: 2e6 if 1 < now_s < 30 else 100e6)
    path.run(1)
    assert path.window.num_bytes == MOST
    path.run(30)
    assert 0.5e6 <= path.window.num_bytes <= 1e6
    assert max(wait_s for when_s, wait_s in path.waits_s if when_s > 12) <= 1.2 * TARGET_S
    path.run(35)
    assert path.window.num_bytes == MOST


def test_who_has_little_to_send_keeps_the_window() -> None:
    path = Path(lambda _: 100e6)
    path.run(1)
    for at_s in range(10):  # few bytes, and a receiver that takes its time
        path.window.answered(1000, 2 + at_s, 2.3 + at_s)
    assert path.window.num_bytes == MOST


def test_a_standstill_costs_half_of_it_once() -> None:
    window = Window(MOST)
    for at_s in range(5):
        window.answered(1 << 20, at_s, at_s + 0.001)
    assert window.num_bytes == MOST
    for _ in range(3):
        window.answered(2 << 20, 10.0, 13.0)
    assert window.num_bytes == MOST // 2
