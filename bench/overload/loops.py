"""The two ways to load a service: as many at once as it takes, and whatever it takes or not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legato.bench.overload.outcome import ask

if TYPE_CHECKING:
    from legato.bench.overload.mix import Deadlines, Mix
    from legato.bench.overload.outcome import Outcome
    from legato.protos import generation_pb2_grpc

# Without a deadline that could matter: the closed loop measures what the service can do.
PATIENT_S = 300.0


async def closed_loop(
    stub: generation_pb2_grpc.GenerationAsyncStub, mix: Mix, num_streams: int, seconds: float
) -> list[Outcome]:
    """Keeps `num_streams` requests under way for so long; what is under way then is finished."""
    until_s = time.monotonic() + seconds

    async def stream() -> list[Outcome]:
        outcomes = []
        while time.monotonic() < until_s:
            outcomes.append(await ask(stub, mix.draw(), PATIENT_S))
        return outcomes

    streams = await asyncio.gather(*(stream() for _ in range(num_streams)))
    return [outcome for outcomes in streams for outcome in outcomes]


@dataclass
class Flood:
    """What an open loop sent, and what came of it."""

    rate: float  # arrivals a second, as asked for
    began_s: float = 0.0
    ended_s: float = 0.0  # of sending
    asking: list[asyncio.Task[Outcome]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)  # each sent so long after its time

    @property
    def offered_rate(self) -> float:
        """Arrivals a second, as sent."""
        return len(self.delays_s) / (self.ended_s - self.began_s)

    async def finish(self) -> None:
        """Waits for what is still under way; the deadlines bound it."""
        self.outcomes = list(await asyncio.gather(*self.asking))


async def open_loop(
    stub: generation_pb2_grpc.GenerationAsyncStub,
    mix: Mix,
    rate: float,
    seconds: float,
    deadlines: Deadlines,
) -> Flood:
    """Poisson arrivals for so long, whether or not anything comes back."""
    flood = Flood(rate, began_s=time.monotonic())
    due_s = flood.began_s
    while True:
        due_s += mix.gap_s(rate)
        if due_s >= flood.began_s + seconds:
            break
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        flood.delays_s.append(time.monotonic() - due_s)
        request = mix.draw()
        flood.asking.append(asyncio.create_task(ask(stub, request, deadlines.of(request))))
    flood.ended_s = time.monotonic()
    return flood
