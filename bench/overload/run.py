"""run: peak, flood and recovery of one running service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import grpc

from legato.bench.overload.loops import Flood, closed_loop, open_loop
from legato.bench.overload.memory import ServiceMemory
from legato.bench.overload.mix import Deadlines, Mix
from legato.bench.overload.outcome import End, ask
from legato.bench.overload.report import (
    faults,
    finished,
    flood_report,
    quantile,
    rate_within,
    spread,
)
from legato.protos import cluster_pb2, cluster_pb2_grpc, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# Times the median answer at the peak: what users wait who know the service.
INTERACTIVE_PATIENCE, BATCH_PATIENCE = 4.0, 12.0
# The first token is there in the idle service's time again: so many times it, and what a machine
# that is shared adds by itself.
NORMAL_TTFT, NORMAL_EXTRA_S = 3.0, 0.05
GIVE_UP_RECOVERY_S = 30.0
NUM_IDLE = 12
LEAST_ANSWERS = 4.0  # the flood lasts so many times a median answer, or says nothing
CALL_S = 60.0
MOST_PROBES_S, MOST_PROBE_SHARE = 10.0, 0.2  # a second; of the load, of which they are a part


class NoPeakError(Exception):
    """The closed loop did not show what the service can do."""


@dataclass(frozen=True)
class Plan:
    """What to run."""

    address: str
    peak_s: float
    flood_s: float
    factor: float  # of the peak
    num_streams: int  # of the closed loop: more than the service can run at once
    seed: int = 1


@dataclass(frozen=True)
class Peak:
    """What the service does when it always has enough to do."""

    requests_s: float
    tokens_s: float
    median_s: float  # of an answer


@dataclass
class Probe:
    """The process of `probe.py`."""

    process: asyncio.subprocess.Process
    said: dict[str, object]

    async def end(self) -> None:
        """It prints what it found when its input ends."""
        output, _ = await self.process.communicate(b"")
        self.said = json.loads(output)


async def run(plan: Plan) -> dict[str, object]:
    """The JSON line; its "invalid" and "wrong" are empty where all is as it must be.

    Raises:
        NoPeakError: there is nothing to measure the flood by.
    """
    async with grpc.aio.insecure_channel(
        plan.address, options=[("grpc.enable_http_proxy", 0)]
    ) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        cluster = cluster_pb2_grpc.ClusterStub(channel)
        status = await cluster.GetStatus(cluster_pb2.GetStatusRequest(), timeout=CALL_S)
        memory = ServiceMemory(status)
        idle_ttft_s = await _idle_ttft_s(stub, Mix(plan.seed, 0.0))
        peak = await _peak(stub, plan)
        deadlines = Deadlines(INTERACTIVE_PATIENCE * peak.median_s, BATCH_PATIENCE * peak.median_s)
        rate = plan.factor * peak.requests_s
        probe_rate = min(MOST_PROBES_S, MOST_PROBE_SHARE * rate)
        samples: list[dict[str, int]] = []
        async with _probe(plan.address, deadlines.interactive_s, probe_rate) as probe:
            sampling = asyncio.create_task(_sample(memory, samples, plan.flood_s))
            mix = Mix(plan.seed + 2)
            flood = await open_loop(stub, mix, rate - probe_rate, plan.flood_s, deadlines)
            await sampling
            await probe.end()
        normal_s = NORMAL_TTFT * idle_ttft_s + NORMAL_EXTRA_S
        recovery_s = await _recovery_s(stub, Mix(plan.seed + 3, 0.0), flood, normal_s)
        await flood.finish()
    probes_done = probe.said["finished"]
    assert isinstance(probes_done, list), "as the probe prints it"
    done = [*finished(flood.outcomes), *((at_s, tokens) for at_s, tokens in probes_done)]
    goodput = rate_within(done, flood.began_s + peak.median_s, flood.ended_s)
    refusals_s, router_s, health_s = (
        _seconds(probe.said[name]) for name in ("refusals_s", "router_s", "health_s")
    )
    report: dict[str, object] = {
        "capacity": asdict(peak),
        "deadlines": asdict(deadlines),
        "named_rate": round(rate, 2),
        "probe_rate": round(probe_rate, 2),
        "flood_s": plan.flood_s,
        "goodput": goodput,
        "goodput_ratio": round(goodput["requests_s"] / peak.requests_s, 3),
        "goodput_tokens_ratio": round(goodput["tokens_s"] / peak.tokens_s, 3),
        "flood": flood_report(flood),
        "probe": {
            "asked": probe.said["asked"],
            "refusal_s": spread(refusals_s),
            "refusal_router_s": spread(router_s),
            "without_hint": probe.said["without_hint"],
            "idle_call_s": spread(health_s),
        },
        "idle_ttft_s": idle_ttft_s,
        "normal_ttft_s": round(normal_s, 5),
        "recovery_s": recovery_s,
        "rss_bytes": dict(zip(("begin", "quarter", "end"), samples, strict=True)),
        "memory_growth": {
            name: round(samples[2][name] / rss, 4)
            for name, rss in samples[1].items()
            if name in samples[2]
        },
    }
    report["invalid"], report["wrong"] = faults(report, rate - probe_rate)
    return report


def _seconds(said: object) -> list[float]:
    assert isinstance(said, list), "as the probe prints it"
    return said


async def _idle_ttft_s(stub: generation_pb2_grpc.GenerationAsyncStub, mix: Mix) -> float:
    """The median; the first ones warm the service up."""
    outcomes = [await ask(stub, mix.draw(), CALL_S) for _ in range(2 * NUM_IDLE)]
    return quantile([o.ttft_s for o in outcomes[NUM_IDLE:] if o.ttft_s is not None], 0.5) or 0.0


async def _peak(stub: generation_pb2_grpc.GenerationAsyncStub, plan: Plan) -> Peak:
    """Without the closed loop's beginning, in which batches are small yet."""
    begin_s = time.monotonic() + plan.peak_s / 4
    end_s = begin_s + plan.peak_s
    outcomes = await closed_loop(stub, Mix(plan.seed + 1), plan.num_streams, 1.25 * plan.peak_s)
    done = [o.latency_s for o in outcomes if o.end is End.FINISHED]
    if len(done) < len(outcomes) or not done:
        texts = sorted({o.text for o in outcomes if o.text})[:3]
        raise NoPeakError(
            f"{len(outcomes) - len(done)} requests of the closed loop failed: {texts}"
        )
    peak = Peak(
        **rate_within(finished(outcomes), begin_s, end_s), median_s=quantile(done, 0.5) or 0.0
    )
    if plan.flood_s < LEAST_ANSWERS * peak.median_s or plan.peak_s < peak.median_s:
        raise NoPeakError(
            f"an answer takes {peak.median_s:.3g} s: a closed loop of {plan.peak_s:g} s, "
            f"or a flood of {plan.flood_s:g} s, is too short to tell anything"
        )
    if not peak.requests_s:
        raise NoPeakError(f"no request of the closed loop finished within {plan.peak_s:g} s")
    return peak


async def _sample(memory: ServiceMemory, samples: list[dict[str, int]], flood_s: float) -> None:
    """At the flood's beginning, at a quarter of it, and shortly before its end."""
    began_s = time.monotonic()
    for share in (0.0, 0.25, 0.98):
        await asyncio.sleep(max(0.0, began_s + share * flood_s - time.monotonic()))
        samples.append(memory.rss_bytes())


@contextlib.asynccontextmanager
async def _probe(address: str, deadline_s: float, rate: float) -> AsyncIterator[Probe]:
    words = ("--address", address, "--deadline-s", str(deadline_s), "--rate", str(rate))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "legato.bench.overload.probe",
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Probe(process, {})
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _recovery_s(
    stub: generation_pb2_grpc.GenerationAsyncStub, mix: Mix, flood: Flood, normal_s: float
) -> float | None:
    """From the flood's end until a request was sent that had its first token in the normal time, as
    the next two had; None: not within GIVE_UP_RECOVERY_S.
    """
    normal: list[float] = []  # when they were sent
    while len(normal) < 3:
        outcome = await ask(stub, mix.draw(), CALL_S)
        if outcome.ttft_s is not None and outcome.ttft_s <= normal_s:
            normal.append(outcome.sent_s)
        else:
            normal.clear()
        if time.monotonic() - flood.ended_s > GIVE_UP_RECOVERY_S:
            return None
    return round(max(0.0, normal[0] - flood.ended_s), 3)
