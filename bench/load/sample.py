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
    message_times_s: list[float] = field(default_factory=list)  # of those that brought tokens
    ended_s: float | None = None
    code: str = UNFINISHED  # "OK", a gRPC code, "HTTP 503", INCOMPLETE or UNFINISHED
    error: str = ""
    stream: int | None = None  # of a closed load, which of those that take turns
    is_warmup: bool = False
    # What the server says of it, where it does.
    finish: generation_pb2.Finish | None = None  # Legato's, over gRPC
    server_times_s: dict[str, float] = field(default_factory=dict)  # others', by Timings' names
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    counted_by: str = ""  # how it is known how many tokens a message has

    @property
    def ok(self) -> bool:
        """Finished as it should."""
        return self.code == "OK"

    @property
    def ttft_s(self) -> float:
        """Of one that is ok."""
        return self.token_times_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        """Of one that is ok: until its last token."""
        return self.token_times_s[-1] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Between each token and the one before it."""
        return [b - a for a, b in pairwise(self.token_times_s)]

    @property
    def token_mean_s(self) -> float | None:
        """Of its gaps; None where the answer has one token."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def note(self, now_s: float, count: int) -> None:
        """A message with so many tokens, at least one, came."""
        self.message_times_s.append(now_s)
        note_tokens(self.token_times_s, now_s, count)

    def recount(self, total: int) -> None:
        """All messages together had `total` tokens: each is taken to have had its share, and the
        first at least one.
        """
        times, self.token_times_s = self.message_times_s, []
        noted = 0
        for number, now_s in enumerate(times, 1):
            until = -(-total * number // len(times))
            if until > noted:
                note_tokens(self.token_times_s, now_s, until - noted)
            noted = until

    def end(self, now_s: float, says: int | None) -> None:
        """The stream ended without an error. `says`: how many tokens it had, as the server counts;
        None where it does not say.
        """
        self.ended_s = now_s
        came = len(self.token_times_s)
        if came and says in (None, came):
            self.code = "OK"
        else:
            self.code = INCOMPLETE
            told = "" if says is None else f", and it says that it had {says}"
            self.error = f"the answer ended with {came} tokens{told}"

    def fail(self, now_s: float, code: str, error: str) -> None:
        """It got no whole answer."""
        self.ended_s, self.code, self.error = now_s, code, error
