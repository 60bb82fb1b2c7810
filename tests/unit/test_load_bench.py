"""The load generator: what is sent when, what is made of what came, and how it ends."""

from __future__ import annotations

import asyncio
import statistics
from itertools import pairwise
from typing import Any

import grpc
import pytest
from fake_generation import FakeGeneration, serving

from legato.bench.load.arrivals import Arrivals
from legato.bench.load.grpc_target import GrpcTarget
from legato.bench.load.report import Slo, report
from legato.bench.load.run import run_load, send_load
from legato.bench.load.sample import Sample
from legato.bench.load.workload import LoadWorkload, Planned
from legato.cluster.client_access import NOTHING_SHOWN
from legato.plan.lengths import Lengths
from legato.plan.trace import TraceLine
from legato.protos import generation_pb2

FOUR, THREE = Lengths.parse("4"), Lengths.parse("3")


def closed(concurrency: int, num_requests: int) -> LoadWorkload:
    return LoadWorkload(FOUR, THREE, concurrency=concurrency, num_requests=num_requests)


def sample(due_s: float, *times_s: float, **known: Any) -> Sample:  # noqa: ANN401
    made = Sample(Planned(0, due_s, 4, 3), due_s, known.pop("sent_s", due_s))
    for at_s in times_s:
        made.note(at_s, 1)
    made.finish = generation_pb2.Finish()
    made.finish.timings.prefill_s = 0.5
    made.finish.timings.attempts = 1
    made.finish.timings.kv_bytes_handed_over = 10
    made.end(times_s[-1], known.pop("says", len(times_s)))
    for name, value in known.items():
        setattr(made, name, value)
    return made


def failure(code: str = "UNAVAILABLE", **known: Any) -> Sample:  # noqa: ANN401
    made = Sample(Planned(1, None, 4, 3), 0.0, 0.0, **known)
    made.fail(0.5, code, "gone")
    return made


def test_figures() -> None:
    made = [
        sample(0.0, 1.0, 2.0, 3.0, stream=0),
        sample(1.0, 2.0, 3.0, 4.0, stream=1),
        sample(3.0, 4.0, 5.0, stream=0),
    ]
    result: Any = report(made, Slo(ttft_s=1.0, itl_s=1.0))
    assert (result["requests"], result["ok"], result["failed"]) == (3, 3, 0)
    assert result["ttft_s"]["p50"] == result["itl_s"]["p99"] == result["tpot_s"]["p90"] == 1.0
    assert (result["e2e_s"]["max"], result["e2e_s"]["count"]) == (3.0, 3)
    # From when both streams had a token until the first is idle: 2 to 4, four tokens after 2.
    assert result["window_s"] == 2.0
    assert result["output_tokens_per_s"] == 2.0
    assert result["input_tokens_per_s"] == 2.0
    assert result["requests_per_s"] == 1.0
    assert result["straddling"] == 3
    assert result["goodput"]["share"] == result["goodput"]["requests_per_s"] == 1.0
    assert result["server"]["source"] == "each answer"
    assert result["server"]["prefill_s"]["p50"] == 0.5
    assert result["server"]["kv_bytes_handed_over"] == 30


def test_latencies_count_from_when_a_request_was_due_not_from_when_it_was_sent() -> None:
    late = sample(0.0, 3.0, 3.1, sent_s=2.0)
    result: Any = report([late], Slo(ttft_s=2.0))
    assert (result["ttft_s"]["p50"], result["e2e_s"]["p50"]) == (3.0, 3.1)
    assert result["sent_late_s"]["p50"] == 2.0
    assert result["goodput"]["share"] == 0.0


def test_failures_are_counted_by_code_and_are_never_good() -> None:
    lost = sample(0.0, 1.0, says=2)  # a token was lost on the way
    cut = Sample(Planned(1, None, 4, 3), 0.0, 0.0)
    result: Any = report([sample(0.0, 1.0, 2.0), failure(), lost, cut], Slo())
    assert (result["ok"], result["failed"], result["unfinished"]) == (1, 2, 1)
    assert result["errors"]["UNAVAILABLE"] == {"count": 1, "first": "gone"}
    assert result["errors"]["INCOMPLETE"]["count"] == 1
    assert result["goodput"]["share"] == round(1 / 3, 4)
    assert result["ttft_s"]["max"] == 1.0


def test_without_an_answer_there_are_no_figures() -> None:
    result: Any = report([failure()], Slo())
    assert (result["ttft_s"], result["window_s"], result["output_tokens_per_s"]) == (None,) * 3


def test_a_seed_says_what_is_sent_and_when() -> None:
    lengths = Lengths.parse("10..100")
    made = LoadWorkload(lengths, lengths, rate_per_s=50.0, num_requests=2000, seed=3)
    first, again = list(made.requests()), list(made.requests())
    assert first == again
    assert made.draw(first[0], 20, 100) == made.draw(again[0], 20, 100)
    assert made.draw(first[0], 20, 100) != made.draw(first[1], 20, 100)
    times = [planned.at_s or 0.0 for planned in first]
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.1)  # as exponential gaps have it
    sizes = {planned.input_tokens for planned in first}
    assert (min(sizes), max(sizes)) == (10, 100)


def test_without_a_seed_no_prompt_comes_again() -> None:
    made = [closed(1, 1) for _ in range(2)]
    one, other = (load.draw(next(load.requests()), 20, 50_000) for load in made)
    assert one != other


def test_prompts_share_as_much_as_is_asked() -> None:
    made = LoadWorkload(Lengths.parse("40"), FOUR, concurrency=1, num_requests=2, prefix_share=0.5)
    one, other = (made.draw(p, 40, 50_000) for p in made.requests())
    assert one[:20] == other[:20]
    assert all(a != b for a, b in zip(one[20:], other[20:], strict=True))
    assert (len(one), len(other)) == (40, 40)


def test_a_trace_says_when_and_how_long() -> None:
    lines = [
        TraceLine(at_s=0.5, input_tokens=7, output_tokens=2),
        TraceLine(at_s=2.0, input_tokens=9, output_tokens=3),
    ]
    made = LoadWorkload(None, None, lines)
    assert list(made.requests()) == [Planned(0, 0.5, 7, 2), Planned(1, 2.0, 9, 3)]
    assert made.longest == (9, 12)
    cut = LoadWorkload(None, None, lines, duration_s=1.0)
    assert len(list(cut.requests())) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"num_requests": 1},
        {"num_requests": 1, "rate_per_s": 1.0, "concurrency": 1},
        {"concurrency": 1},
        {
            "concurrency": 1,
            "num_requests": 1,
            "trace": [TraceLine(input_tokens=1, output_tokens=1)],
        },
        {"concurrency": 1, "num_requests": 1, "prefix_share": 1.5},
        {"concurrency": 1, "num_requests": 1, "seed": -1},
        {"concurrency": 1, "num_requests": 1, "arrivals": Arrivals(0)},
    ],
)
def test_a_load_that_cannot_be_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a load|lengths|prefix share|the seed"):
        LoadWorkload(FOUR, THREE, **settings)


async def test_every_request_is_sent_once_and_no_more_at_a_time_than_asked() -> None:
    service = FakeGeneration()
    async with serving(service) as address:
        samples = await run_load(
            closed(3, 7), [address, address], NOTHING_SHOWN, timeout_s=30, num_warmup=2
        )
    # The greeting, the warm-up, and those that count.
    assert (service.num_calls, service.most) == (1 + 2 + 7, 3)
    assert sorted(s.planned.number for s in samples) == list(range(2, 9))
    assert all(s.ok and len(s.token_times_s) == 3 for s in samples)


async def test_an_open_load_goes_on_while_the_service_stalls_and_says_how_long_each_waited() -> (
    None
):
    lines = [TraceLine(at_s=0.1 * i, input_tokens=4, output_tokens=1) for i in range(5)]
    service = FakeGeneration(stalled_s=0.6)
    async with serving(service) as address:
        samples = await run_load(
            LoadWorkload(None, None, lines), [address], NOTHING_SHOWN, timeout_s=30
        )
    assert service.most == 5
    waits = [s.ttft_s for s in samples]
    assert waits == pytest.approx([0.61 - 0.1 * i for i in range(5)], abs=0.15)


async def test_an_unreachable_service_is_a_failure_not_a_figure() -> None:
    with pytest.raises(grpc.RpcError):
        await run_load(closed(1, 1), ["127.0.0.1:1"], NOTHING_SHOWN, timeout_s=5)


async def test_a_stopped_load_keeps_what_it_has_and_cancels_the_rest() -> None:
    service, stop = FakeGeneration(token_s=0.05), asyncio.Event()
    ended = 0

    def count(sample: Sample) -> None:
        nonlocal ended
        ended += sample.ok
        if ended == 2:
            stop.set()

    async with serving(service) as address, GrpcTarget([address], NOTHING_SHOWN) as target:
        samples = await send_load(closed(2, 1000), target, timeout_s=30, stop=stop, on_change=count)
    result: Any = report(samples, Slo())
    assert result["verdict"]["refused_because"][0]["doubt"] == "interrupted"
    assert result["ok"] >= 2
    assert result["ok"] + result["unfinished"] == len(samples) < 6
    assert result["ttft_s"]["p50"] < 1


async def test_a_load_longer_than_the_context_is_refused() -> None:
    async with serving(FakeGeneration()) as address:
        workload = LoadWorkload(Lengths.parse("98"), THREE, concurrency=1, num_requests=1)
        with pytest.raises(ValueError, match="up to 101 tokens, limit 100: the model's context"):
            await run_load(workload, [address], NOTHING_SHOWN, timeout_s=5)
