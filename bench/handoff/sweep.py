"""Sweep: the rate of each lane at other sizes of chunk and window than the product's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.bench.handoff.lanes import LANES, transport
from legato.bench.handoff.rates import BARE_GRPC, RatesRun

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from legato.bench.handoff.rates import Rates
    from legato.bench.handoff.two_workers import TwoWorkers

CHUNK_BYTES = tuple(1 << shift for shift in range(16, 24))  # 64 KiB to 8 MiB
WINDOW_BYTES = tuple(1 << shift for shift in range(20, 26))  # 1 to 32 MiB


def settings() -> Iterator[tuple[int, int]]:
    """Chunk and window: at least two chunks may be unanswered, so that none waits for an answer."""
    for chunk in CHUNK_BYTES:
        for window in WINDOW_BYTES:
            if window >= 2 * chunk:
                yield chunk, window


async def sweep(workers: TwoWorkers, num_tokens: int, num_rounds: int) -> AsyncIterator[Rates]:
    """One setting after the other, each beside bare gRPC with the same one."""
    for chunk, window in settings():
        await workers.ask("Window", num_bytes=window)
        with transport(chunk, window):
            yield await RatesRun(workers, num_tokens, LANES).measure(num_rounds, [BARE_GRPC])
