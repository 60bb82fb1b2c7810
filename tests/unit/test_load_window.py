"""What of a load counts: the warm-up does not, the window ends before the tail, and what is too
little has no verdict."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from typing import TYPE_CHECKING, Any, Self

import pytest

from legato.bench.load.arrivals import Arrivals
from legato.bench.load.report import report
from legato.bench.load.run import send_load
from legato.bench.load.sample import Sample
from legato.bench.load.slo import Slo
from legato.bench.load.target import Served, ServerTimes
from legato.bench.load.verdict import judge
from legato.bench.load.warmup import Warmup
from legato.bench.load.window import Window, measured_window
from legato.bench.load.workload import LoadWorkload, Planned
from legato.plan.lengths import Lengths
from legato.plan.trace import TraceLine

if TYPE_CHECKING:
    from collections.abc import Sequence

FOUR, THREE = Lengths.parse("4"), Lengths.parse("3")
NO_SLO = Slo()


def answer(due_s: float, *times_s: float, **known: Any) -> Sample:  # noqa: ANN401
    made = Sample(Planned(0, None, 4, len(times_s)), due_s, due_s, **known)
    for at_s in times_s:
        made.note(at_s, 1)
    made.end(times_s[-1], len(times_s))
    return made


def streams(num_requests: int, step_s: float, *, warmup: int = 0) -> list[Sample]:
    """Two, of which the second begins half a second later; each answer has its first token after
    a step, and four in all.
    """
    made = []
    for stream, number in itertools.product(range(2), range(num_requests)):
        due_s = 0.5 * stream + 4 * step_s * number
        times = [due_s + step_s * n for n in range(1, 5)]
        made.append(answer(due_s, *times, stream=stream, is_warmup=number < warmup))
    return made


def test_the_window_of_streams_begins_with_the_last_and_ends_with_the_first_that_is_idle() -> None:
    samples = [*streams(3, 1.0), answer(12.5, 13.5, 30.0, 60.0, stream=1)]
    window = measured_window(samples)
    # The tail, in which one stream goes on alone and slowly, is outside.
    assert window == Window(1.5, 12.0)
    assert window.num_tokens(samples) == 21  # of 2, 3, … 12 and 2.5, 3.5, … 11.5
    figures: Any = report(samples, Slo())
    assert figures["output_tokens_per_s"] == 2.0
    assert figures["itl_s"]["max"] == 1.0
    assert figures["straddling"] == 3


def test_a_stream_that_never_had_a_token_leaves_no_window() -> None:
    lost = Sample(Planned(0, None, 4, 4), 0.0, 0.0, stream=2)
    lost.fail(20.0, "UNAVAILABLE", "")
    assert measured_window([*streams(3, 1.0), lost]) is None


def test_a_stall_at_the_end_of_the_window_counts_whole() -> None:
    samples = [answer(0.0, 1.0, 2.0, 3.0, 9.0, stream=0), answer(0.0, 1.0, 2.0, 4.0, stream=1)]
    window = measured_window(samples)
    assert window == Window(1.0, 4.0)
    assert sorted(window.gaps_s(samples)) == [1.0, 1.0, 1.0, 2.0, 6.0]


def test_the_warm_up_is_in_no_latency_and_the_window_comes_behind_it() -> None:
    slow = [answer(0.0, 8.0, 9.0, 10.0, stream=n, is_warmup=True) for n in range(2)]
    quick = [
        answer(10.0 + 4 * k, *(11.0 + 4 * k + n for n in range(4)), stream=stream)
        for stream in range(2)
        for k in range(5)
    ]
    figures: Any = report([*slow, *quick], Slo())
    assert (figures["requests"], figures["warmup"]) == (10, {"requests": 2, "failed": 0})
    assert figures["ttft_s"]["max"] == 1.0
    assert figures["e2e_s"]["max"] == 4.0
    assert (figures["window_s"], figures["output_tokens_per_s"]) == (20.0, 2.0)


def test_what_the_warm_ups_requests_still_send_in_the_window_is_of_the_load() -> None:
    long = answer(0.0, *(1.0 + n for n in range(20)), stream=0, is_warmup=True)
    short = [answer(5.0 * k, 5.0 * k + 1, 5.0 * k + 5, stream=1) for k in range(1, 4)]
    window = measured_window([long, *short])
    assert window == Window(6.0, 20.0)
    assert window.num_tokens([long]) == 14


def test_the_window_of_an_open_load_ends_when_the_last_request_is_sent() -> None:
    samples = [answer(float(n), n + 0.5, n + 1.5, n + 30.0) for n in range(10)]
    assert measured_window(samples) == Window(0.5, 9.0)
    assert measured_window(samples[:1]) is None


def verdict(samples: Sequence[Sample], slo: Slo = NO_SLO, **settings: Any) -> Any:  # noqa: ANN401
    return judge(samples, measured_window(samples), slo, **settings)


def test_the_targets_are_met_by_the_share_of_good_requests() -> None:
    samples = [*streams(10, 1.0), answer(40.5, 43.0, 44.0, 45.0, 46.0, stream=1)]
    assert verdict(samples).met is None
    assert verdict(samples).reasons == ()
    made = verdict(samples, Slo(ttft_s=1.0))
    assert made.met is False
    assert made.text == (
        "the targets are missed: 95.2 % of 21 requests were good, of 99 % that must be"
    )
    assert verdict(samples, Slo(ttft_s=1.0, percentile=95)).met is True
    assert verdict(samples, Slo(itl_s=0.9, percentile=95)).met is False


@pytest.mark.parametrize(
    ("samples", "settings", "doubts"),
    [
        (streams(2, 1.0), {}, ["window too short"]),  # 6.5 s
        (streams(2, 1.0), {"min_window_s": 5.0}, ["window too short"]),  # and answers of 4 s
        (streams(3, 1.0), {"min_window_s": 5.0}, []),
        (streams(1, 4.0), {}, ["window too short"]),
        ([answer(0.0, 1.0)], {}, ["window too short"]),
        ([], {}, ["nothing"]),
    ],
)
def test_too_little_has_no_verdict(
    samples: list[Sample], settings: dict[str, Any], doubts: list[str]
) -> None:
    made = verdict(samples, Slo(ttft_s=9.0), **settings)
    assert [reason.doubt.value for reason in made.reasons] == doubts
    assert made.met is (True if not doubts else None)
    assert made.text.startswith("no verdict" if doubts else "the targets are met")


def test_a_failure_or_a_cut_leaves_no_verdict_and_says_what_to_do() -> None:
    failed = Sample(Planned(0, None, 4, 4), 1.0, 1.0, stream=0)
    failed.fail(1.1, "UNAVAILABLE", "")
    cut = Sample(Planned(0, None, 4, 4), 1.0, 1.0, stream=0, ended_s=50.0)
    made = verdict([*streams(10, 1.0), failed, cut], Slo(ttft_s=9.0))
    assert [reason.doubt.value for reason in made.reasons] == ["interrupted", "failed"]
    assert "1 of 22 requests failed: see to the errors, or ask for less" in made.text


@pytest.mark.parametrize(("word", "cv"), [("poisson", 1), ("gamma:3", 3), ("gamma:0.25", 0.25)])
def test_arrivals_have_the_rate_and_the_scatter_that_they_say(word: str, cv: float) -> None:
    arrivals, draw = Arrivals.parse(word), random.Random(1)
    gaps = [arrivals.gap_s(draw, 20.0) for _ in range(20_000)]
    assert statistics.mean(gaps) == pytest.approx(0.05, rel=0.06)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.06)
    assert str(arrivals) == word


def test_constant_arrivals_are_a_clock() -> None:
    made = LoadWorkload(
        FOUR, THREE, rate_per_s=4.0, duration_s=1.1, arrivals=Arrivals.parse("constant")
    )
    assert [planned.at_s for planned in made.requests()] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("parse", "text", "error"),
    [
        (Arrivals.parse, "gamma", "must be poisson, gamma:CV or constant, got 'gamma'"),
        (Arrivals.parse, "gamma:0", r"CV must be in \[0.01, 100\], got 0"),
        (Arrivals.parse, "gamma:1e9", "must be poisson"),
        (Warmup.parse, "10m", "must be requests, such as 20, or seconds, such as 10s, got '10m'"),
        (Warmup.parse, "-1", "must be requests"),
        (Warmup.parse, "9999999", r"\[0, 1,000,000\] requests, got 9999999"),
        (Warmup.parse, "9999999s", r"\[0, 1,000,000\] seconds"),
    ],
)
def test_what_is_no_such_word_is_refused(parse: Any, text: str, error: str) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=error):
        parse(text)


class Instant:
    """A target whose clock is the test's: each request takes a second of it."""

    served = Served("here", "m", "test", "token ids", None)

    def __init__(self) -> None:
        self.sent: list[int] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def request(self, workload: LoadWorkload, planned: Planned) -> int:
        return planned.number

    async def send(self, request: int, sample: Sample, timeout_s: float) -> None:
        self.sent.append(request)
        sample.note(sample.sent_s, 1)
        sample.end(sample.sent_s, None)

    async def server_times(self, samples: Sequence[Sample]) -> ServerTimes:
        return ServerTimes(None)


@pytest.mark.parametrize(
    ("settings", "num_warmup", "num_counted"),
    [
        ({"concurrency": 2, "num_requests": 6, "warmup": Warmup(3)}, 3, 6),
        ({"rate_per_s": 1000.0, "num_requests": 6, "warmup": Warmup(3)}, 3, 6),
        ({"rate_per_s": 100.0, "duration_s": 0.1, "warmup": Warmup(seconds=0.2),
          "arrivals": Arrivals(0)}, 19, 10),
        ({"rate_per_s": 100.0, "duration_s": 0.1, "warmup": Warmup(5),
          "arrivals": Arrivals(0)}, 5, 10),
        ({"rate_per_s": 100.0, "num_requests": 4, "warmup": Warmup(seconds=0.2),
          "arrivals": Arrivals(0)}, 19, 4),
    ],
)  # fmt: skip
async def test_the_warm_up_comes_first_and_on_top(
    settings: dict[str, Any], num_warmup: int, num_counted: int
) -> None:
    workload = LoadWorkload(FOUR, THREE, **settings)
    samples = await send_load(workload, Instant(), timeout_s=5)
    assert [s.is_warmup for s in samples] == [True] * num_warmup + [False] * num_counted


async def test_a_warm_up_in_seconds_of_a_closed_load_is_seen_as_it_runs() -> None:
    class Slow(Instant):
        async def send(self, request: int, sample: Sample, timeout_s: float) -> None:
            await asyncio.sleep(0.02)
            await super().send(request, sample, timeout_s)

    workload = LoadWorkload(FOUR, THREE, concurrency=1, num_requests=3, warmup=Warmup(seconds=0.1))
    samples = await send_load(workload, Slow(), timeout_s=5)
    warmup = [s for s in samples if s.is_warmup]
    assert len(samples) - len(warmup) == 3
    began_s = samples[0].due_s
    assert all(s.is_warmup == (s.due_s - began_s < 0.1) for s in samples)
    assert warmup


async def test_a_trace_has_its_warm_up_in_itself() -> None:
    lines = [TraceLine(at_s=0.01 * n, input_tokens=4, output_tokens=1) for n in range(5)]
    workload = LoadWorkload(None, None, lines, warmup=Warmup(2))
    samples = await send_load(workload, Instant(), timeout_s=5)
    assert [s.is_warmup for s in samples] == [True, True, False, False, False]


async def test_a_client_that_is_late_has_its_lateness_in_the_latencies() -> None:
    class Busy(Instant):
        def request(self, workload: LoadWorkload, planned: Planned) -> int:
            time.sleep(0.05)  # nothing else goes on meanwhile
            return planned.number

    workload = LoadWorkload(FOUR, THREE, rate_per_s=1000.0, num_requests=8, arrivals=Arrivals(0))
    samples = await send_load(workload, Busy(), timeout_s=5)
    due = [sample.due_s - samples[0].due_s for sample in samples]
    assert due == pytest.approx([0.001 * n for n in range(8)])
    assert samples[7].ttft_s > 8 * 0.05 - 0.008
    figures: Any = report(samples, NO_SLO)
    assert figures["sent_late_s"]["max"] > 0.39
