"""PrefillQueue: how long prompts wait for one of several prefill workers; M/G/c, approximately."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """Zero for most; else exponential: what a tail of `probability * exp(-t / mean_s)` says."""

    probability: float  # of waiting at all
    mean_s: float  # of those that wait

    def beyond(self, seconds: float) -> float:
        """The share that waits longer."""
        if seconds < 0:
            return 1.0
        return self.probability * math.exp(-seconds / self.mean_s) if self.mean_s else 0.0


NO_WAIT = Wait(0.0, 0.0)


def prefill_wait(
    rate_per_s: float, service_mean_s: float, service_square_s2: float, num_workers: int
) -> Wait | None:
    """First come, first served; Poisson arrivals; None where they are more than can be served.

    The chance to wait is Erlang's C, and the mean wait of those that do is Allen's and Cunneen's:
    that of M/M/c times (1 + cv²) / 2. With one worker both are exact (Pollaczek and Khinchine);
    the exponential tail is an approximation everywhere but for M/M/c.
    """
    offered = rate_per_s * service_mean_s
    if offered >= num_workers:
        return None
    if offered <= 0:
        return NO_WAIT
    squares = service_square_s2 / service_mean_s**2
    mean_s = service_mean_s * squares / 2 / (num_workers - offered)
    return Wait(erlang_c(offered, num_workers), mean_s)


def erlang_c(offered: float, num_servers: int) -> float:
    """The share of arrivals that find all servers busy; `offered` erlangs, below the servers."""
    blocked = 1.0  # Erlang's B, by its recursion, which neither overflows nor cancels
    for servers in range(1, num_servers + 1):
        blocked = offered * blocked / (servers + offered * blocked)
    utilisation = offered / num_servers
    return blocked / (1 - utilisation * (1 - blocked))


def beyond_both(first: Wait, second: Wait, seconds: float) -> float:
    """The share whose two waits, one after the other and independent, are longer in all."""
    if seconds < 0:
        return 1.0
    only_first = first.beyond(seconds) * (1 - second.probability)
    only_second = second.beyond(seconds) * (1 - first.probability)
    both = first.probability * second.probability
    if both == 0:
        return only_first + only_second
    a, b = first.mean_s, second.mean_s
    if abs(a - b) < 1e-9 * max(a, b):
        tail = (1 + seconds / a) * math.exp(-seconds / a)
    else:
        tail = (a * math.exp(-seconds / a) - b * math.exp(-seconds / b)) / (a - b)
    return only_first + only_second + both * tail
