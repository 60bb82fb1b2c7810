"""StreamName: what the engine is to know of a stream, in the id of its request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamName:
    """`period_us`: between two tokens; 0: as fast as they are taken. `phase_us`: the tokens leave
    when the clock modulo the period is this.
    """

    run: int
    number: int
    period_us: int
    phase_us: int

    def __str__(self) -> str:
        return f"{self.run}-{self.number}-{self.period_us}-{self.phase_us}"

    @classmethod
    def parse(cls, text: str) -> StreamName:
        """What `str` made; over HTTP the router puts something behind it."""
        run, number, period_us, phase_us, *_ = text.split("-")
        return cls(int(run), int(number), int(period_us), int(phase_us))
