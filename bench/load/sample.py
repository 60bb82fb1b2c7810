"""Sample: what a client saw of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.bench.load.workload import Planned
    from legato.protos import generation_pb2

UNFINISHED = "UNFINISHED"  # the run was interrupted
INCOMPLETE = "INCOMPLETE"  # the stream ended without its finish, or with other tokens than it says


def note_tokens(times_s: list[float], now_s: float, count: int) -> None:
    """Tokens that share a message are taken to have come evenly since the one before."""
    last_s = times_s[-1] if times_s else now_s
    times_s += [last_s + (now_s - last_s) * (i + 1) / count for i in range(count)]


@dataclass
class Sample:
    """Times are on this client's monotonic clock."""

    planned: Planned
    due_s: float  # when it was to be sent: latencies count from here, however late it went out
    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    finish: generation_pb2.Finish | None = None
    code: str = UNFINISHED  # "OK", a gRPC code, INCOMPLETE or UNFINISHED
    error: str = ""

    @property
    def ok(self) -> bool:
        """Finished as it should."""
        return self.code == "OK"

    @property
    def ttft_s(self) -> float:
        """Of one that is ok."""
        return self.token_times_s[0] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Between each token and the one before it."""
        return [b - a for a, b in pairwise(self.token_times_s)]

    @property
    def token_mean_s(self) -> float | None:
        """Of its gaps; None where the answer has one token."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def end(self, now_s: float) -> None:
        """The stream ended without an error."""
        self.ended_s = now_s
        whole = self.finish is not None and self.finish.usage.completion_tokens == len(
            self.token_times_s
        )
        self.code = "OK" if whole and self.token_times_s else INCOMPLETE
