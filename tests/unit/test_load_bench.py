"""The load generator: what is sent when, what is made of what came, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from legato.bench.load.report import Slo, report
from legato.bench.load.run import run_load
from legato.bench.load.sample import Sample
from legato.bench.load.workload import LoadWorkload, Planned
from legato.cluster.client_access import NOTHING_SHOWN
from legato.plan.lengths import Lengths
from legato.plan.trace import TraceLine
from legato.protos import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


FOUR, THREE = Lengths.parse("4"), Lengths.parse("3")


def closed(concurrency: int, num_requests: int) -> LoadWorkload:
    return LoadWorkload(FOUR, THREE, concurrency=concurrency, num_requests=num_requests)


def sample(
    due_s: float, *times_s: float, sent_s: float | None = None, says: int | None = None
) -> Sample:
    made = Sample(Planned(0, due_s, 4, 3), due_s, due_s if sent_s is None else sent_s)
    made.token_times_s = list(times_s)
    finish = generation_pb2.Finish()
    finish.usage.completion_tokens = len(times_s) if says is None else says
    finish.timings.prefill_s = 0.5
    finish.timings.attempts = 1
    finish.timings.kv_bytes_handed_over = 10
    made.finish = finish
    made.end(times_s[-1])
    return made


def test_figures() -> None:
    made = [sample(0.0, 1.0, 2.0, 3.0), sample(1.0, 2.0, 3.0, 4.0), sample(3.0, 4.0, 5.0)]
    result: Any = report(made, Slo(ttft_s=1.0, itl_s=1.0), concurrency=2)
    assert (result["requests"], result["ok"], result["failed"]) == (3, 3, 0)
    assert result["ttft_s"]["p50"] == result["itl_s"]["p99"] == 1.0
    assert result["e2e_s"]["max"] == 3.0
    # From when both streams had a token until the last was sent: 2 to 3, two tokens after 2.
    assert result["window_s"] == 1.0
    assert result["output_tokens_per_s"] == 2.0
    assert result["requests_per_s"] == 1.0
    assert result["goodput"]["share"] == 1.0
    assert result["server"]["prefill_s"]["p50"] == 0.5
    assert result["server"]["kv_bytes_handed_over"] == 30


def test_latencies_count_from_when_a_request_was_due_not_from_when_it_was_sent() -> None:
    late = sample(0.0, 3.0, 3.1, sent_s=2.0)
    result: Any = report([late], Slo(ttft_s=2.0), concurrency=None)
    assert result["ttft_s"]["p50"] == 3.0
    assert result["sent_late_s"]["p50"] == 2.0
    assert result["goodput"]["share"] == 0.0


def test_failures_are_counted_by_code_and_are_never_good() -> None:
    failed = Sample(Planned(1, None, 4, 3), 0.0, 0.0, code="UNAVAILABLE", error="gone")
    lost = sample(0.0, 1.0, says=2)  # a token was lost on the way
    cut = Sample(Planned(1, None, 4, 3), 0.0, 0.0)
    result: Any = report([sample(0.0, 1.0, 2.0), failed, lost, cut], Slo(), concurrency=1)
    assert (result["ok"], result["failed"], result["unfinished"]) == (1, 2, 1)
    assert result["errors"]["UNAVAILABLE"] == {"count": 1, "first": "gone"}
    assert result["errors"]["INCOMPLETE"]["count"] == 1
    assert result["goodput"]["share"] == round(1 / 3, 4)
    assert result["ttft_s"]["max"] == 1.0


def test_without_an_answer_there_are_no_figures() -> None:
    failed = Sample(Planned(1, None, 4, 3), 0.0, 0.0, code="UNAVAILABLE", error="gone")
    result: Any = report([failed], Slo(), concurrency=1)
    assert (result["ttft_s"], result["window_s"], result["output_tokens_per_s"]) == (None,) * 3


def test_a_seed_says_what_is_sent_and_when() -> None:
    lengths = Lengths.parse("10..100")
    made = LoadWorkload(lengths, lengths, rate_per_s=50.0, num_requests=2000, seed=3)
    first, again = list(made.requests()), list(made.requests())
    assert first == again
    assert made.message(first[0], 100) == made.message(again[0], 100)
    assert made.message(first[0], 100) != made.message(first[1], 100)
    times = [planned.at_s or 0.0 for planned in first]
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.1)  # as exponential gaps have it
    sizes = {planned.input_tokens for planned in first}
    assert (min(sizes), max(sizes)) == (10, 100)


def test_prompts_share_as_much_as_is_asked() -> None:
    made = LoadWorkload(Lengths.parse("40"), FOUR, concurrency=1, num_requests=2, prefix_share=0.5)
    one, other = (list(made.message(p, 50_000).token_ids.ids) for p in made.requests())
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
    ],
)
def test_a_load_that_cannot_be_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a load|lengths|prefix share"):
        LoadWorkload(FOUR, THREE, **settings)


class Service(generation_pb2_grpc.GenerationServicer):
    """Answers; knows how many calls ran at once. All calls wait while it is stalled."""

    def __init__(self, stalled_s: float = 0.0, token_s: float = 0.01) -> None:
        self.num_calls = self.running = self.most = 0
        self._stalled_s, self._token_s = stalled_s, token_s
        self._free_s = 0.0

    async def GetModel(  # type: ignore[override]  # noqa: N802  # aio's form, gRPC's spelling
        self, request: generation_pb2.GetModelRequest, context: object
    ) -> generation_pb2.GetModelResponse:
        return generation_pb2.GetModelResponse(vocab_size=1000, context_length=100)

    async def Generate(  # type: ignore[override]  # noqa: N802  # aio's form, gRPC's spelling
        self, request: generation_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.num_calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        now_s = asyncio.get_running_loop().time()
        self._free_s = self._free_s or now_s + self._stalled_s
        await asyncio.sleep(max(0.0, self._free_s - now_s))
        for index in range(request.sampling.max_tokens):
            await asyncio.sleep(self._token_s)
            delta = generation_pb2.Delta(token_ids=[index], token_offset=index)
            yield generation_pb2.GenerateResponse(delta=delta)
        self.running -= 1
        usage = generation_pb2.Usage(completion_tokens=request.sampling.max_tokens)
        yield generation_pb2.GenerateResponse(finish=generation_pb2.Finish(usage=usage))


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[str]:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_every_request_is_sent_once_and_no_more_at_a_time_than_asked() -> None:
    service = Service()
    async with serving(service) as address:
        samples = await run_load(
            closed(3, 7), [address, address], NOTHING_SHOWN, timeout_s=30, num_warmup=2
        )
    assert (service.num_calls, service.most) == (9, 3)
    assert sorted(s.planned.number for s in samples) == list(range(7))
    assert all(s.ok and len(s.token_times_s) == 3 for s in samples)


async def test_an_open_load_goes_on_while_the_service_stalls_and_says_how_long_each_waited() -> (
    None
):
    lines = [TraceLine(at_s=0.1 * i, input_tokens=4, output_tokens=1) for i in range(5)]
    service = Service(stalled_s=0.6)
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
    service, stop = Service(token_s=0.05), asyncio.Event()
    ended = 0

    def count(sample: Sample) -> None:
        nonlocal ended
        ended += sample.ok
        if ended == 2:
            stop.set()

    async with serving(service) as address:
        samples = await run_load(
            closed(2, 1000), [address], NOTHING_SHOWN, timeout_s=30, stop=stop, on_change=count
        )
    result: Any = report(samples, Slo(), 2)
    assert result["ok"] >= 2
    assert result["ok"] + result["unfinished"] == len(samples) < 6
    assert result["ttft_s"]["p50"] < 1


async def test_a_load_longer_than_the_context_is_refused() -> None:
    async with serving(Service()) as address:
        workload = LoadWorkload(Lengths.parse("98"), THREE, concurrency=1, num_requests=1)
        with pytest.raises(ValueError, match="up to 101 tokens, limit 100: the model's context"):
            await run_load(workload, [address], NOTHING_SHOWN, timeout_s=5)


async def command(*words: str, interrupt: bool = False) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "legato.cluster.cli.main", "bench", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "120"},
    )
    if interrupt:
        await asyncio.sleep(3)
        process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


LENGTHS = ("--input-tokens", "4", "--output-tokens", "3")


async def test_the_command_prints_tables_and_json() -> None:
    async with serving(Service()) as address:
        load = ("--address", address, *LENGTHS, "--concurrency", "2", "--num-requests", "6")
        code, out, err = await command(*load, "--ttft-slo", "5", "--itl-slo", "0.000001")
        assert (code, err) == (0, "")
        assert "time to first token" in out
        assert "requests: 6 ok, 0 failed" in out
        assert "goodput: 0.0 %" in out
        code, out, err = await command(*load, "--json")
        figures = json.loads(out)
        assert (code, figures["ok"], figures["interrupted"]) == (0, 6, False)
        assert figures["ttft_s"]["p90"] > 0


async def test_an_interrupted_command_prints_what_it_has() -> None:
    async with serving(Service(token_s=0.02)) as address:
        load = ("--address", address, *LENGTHS, "--rate", "20", "--duration", "100", "--json")
        code, out, err = await command(*load, interrupt=True)
    figures = json.loads(out)
    assert code == 130
    assert figures["interrupted"]
    assert figures["ok"] > 0
    assert "what was measured follows" in err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--concurrency", "1", "--num-requests", "1"), "--input-tokens and --output-tokens"),
        ((*LENGTHS, "--concurrency", "1"), "--num-requests or --duration"),
        ((*LENGTHS, "--num-requests", "1"), "a load needs a rate"),
        (("--input-tokens", "x", "--output-tokens", "3", "--rate", "1", "--num-requests", "1"),
         "must be 512, 100..900"),
        (("--trace", "/nowhere.jsonl"), "/nowhere.jsonl: cannot be read"),
        (("--port", "1", *LENGTHS, "--rate", "1", "--num-requests", "1"), "no service answers"),
    ],
)  # fmt: skip
async def test_wrong_use_gets_one_line(words: tuple[str, ...], error: str) -> None:
    code, out, err = await command(*words)
    assert (code in (1, 2), out, len(err.splitlines())) == (True, "", 1)
    assert error in err
