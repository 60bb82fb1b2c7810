"""Watchdog: the last bound, of calls that nothing can interrupt."""

from __future__ import annotations

import os
import sys
import threading


class Watchdog:
    """Ends this process where a call into Ray never returns: nothing else can interrupt it."""

    def __init__(self, timeout_s: float, what: str, before: str = "") -> None:
        """`what` did not succeed within `timeout_s`, it says, behind what went wrong before."""
        self._timer = threading.Timer(timeout_s, self._bark, (timeout_s, what, before))
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    @staticmethod
    def _bark(timeout_s: float, what: str, before: str) -> None:
        text = f"{what} did not succeed within {timeout_s:g} s"
        text = f"{before}; {text}" if before else text
        print(f"legato: {text}", file=sys.stderr, flush=True)
        os._exit(1)
