"""Streams beside arriving prompts: clients of servers, and engines, in the same phase."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
from interference_records import SMALL
from tiny_models import make_llama_folder

from legato.bench.bare_engine import BareEngine
from legato.bench.engine import worker_config
from legato.bench.peers.interference.client_phase import run_phase
from legato.bench.peers.interference.servers import num_tokens
from legato.bench.peers.interference.sse_client import server_events
from legato.bench.peers.interference.workload import (
    PhaseRecord,
    figures,
)
from legato.bench.peers.timed_engine import run_closed
from legato.bench.peers.timed_engine import run_phase as run_engine_phase

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path


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
