"""LoadWindow: how long clients of one router waited of late, for first tokens and for others."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 10.0
# Of one slot: enough for a percentile, however many requests come.
MAX_SAMPLES = 1000
SLOW_CLIENT_S = 0.02


@dataclass(frozen=True)
class WindowFigures:
    """Of the last WINDOW_S; a time is 0 where its number is 0."""

    num_first_tokens: int = 0
    ttft_p90_s: float = 0.0
    num_tokens: int = 0  # that came after a first one
    itl_mean_s: float = 0.0


@dataclass
class _Slot:
    ends_at_s: float
    ttfts_s: list[float]
    gaps_s: float
    num_tokens: int


class LoadWindow:
    """Adding to it takes two sums for each message of tokens and no clock: `close_slot`, about once
    a second, is what moves the window.
    """

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._ttfts_s: list[float] = []
        self._gaps_s = 0.0
        self._num_tokens = 0

    def note_first_token(self, ttft_s: float) -> None:
        """An answer began."""
        if len(self._ttfts_s) < MAX_SAMPLES:
            self._ttfts_s.append(ttft_s)

    def note_tokens(self, gap_s: float, num_tokens: int) -> None:
        """So many tokens of an answer came together, `gap_s` after those before."""
        self._gaps_s += gap_s
        self._num_tokens += num_tokens

    def close_slot(self, now_s: float) -> WindowFigures:
        """Forgets what is older than the window, and tells the figures of the rest."""
        self._slots.append(_Slot(now_s, self._ttfts_s, self._gaps_s, self._num_tokens))
        self._ttfts_s, self._gaps_s, self._num_tokens = [], 0.0, 0
        while self._slots[0].ends_at_s <= now_s - WINDOW_S:
            self._slots.popleft()
        ttfts_s = sorted(ttft_s for slot in self._slots for ttft_s in slot.ttfts_s)
        num_tokens = sum(slot.num_tokens for slot in self._slots)
        gaps_s = sum(slot.gaps_s for slot in self._slots)
        return WindowFigures(
            num_first_tokens=len(ttfts_s),
            ttft_p90_s=ttfts_s[min(len(ttfts_s) - 1, len(ttfts_s) * 9 // 10)] if ttfts_s else 0.0,
            num_tokens=num_tokens,
            itl_mean_s=gaps_s / num_tokens if num_tokens else 0.0,
        )


class TokenGaps:
    """Measures the gaps between an answer's tokens, for all answers of one decode call.

    A gap of which the client took more than half and SLOW_CLIENT_S, being slow to read, is left
    out: it says nothing of decode.
    """

    def __init__(self, window: LoadWindow, now_s: float) -> None:
        self._window = window
        self._since_s = self._arrived_s = now_s
        self._held_s = 0.0  # by clients, of this call so far
        self._last: dict[int, tuple[float, float]] = {}  # of an answer: when, and `_held_s` then

    def arrived(self, number: int, num_tokens: int, now_s: float) -> None:
        """A message of answer `number` came."""
        last_s, held_s = self._last.get(number, (self._since_s, 0.0))
        gap_s = now_s - last_s
        by_client_s = self._held_s - held_s
        if by_client_s <= SLOW_CLIENT_S or 2 * by_client_s <= gap_s:
            self._window.note_tokens(gap_s, num_tokens)
        self._last[number] = now_s, self._held_s
        self._arrived_s = now_s

    def delivered(self, now_s: float) -> None:
        """gRPC took that message on towards the client."""
        self._held_s += now_s - self._arrived_s
