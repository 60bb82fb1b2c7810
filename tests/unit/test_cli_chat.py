"""`legato chat` against a service of canned answers: turns, commands, Ctrl-C, what goes wrong."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from concurrent import futures
from typing import TYPE_CHECKING

import grpc
import pytest

from legato.cluster.cli import chat as chat_command
from legato.cluster.cli import main as cli
from legato.cluster.gateway import SERVER_OPTIONS
from legato.protos import common_pb2, generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

Captured = pytest.CaptureFixture[str]


class Parrot(generation_pb2_grpc.GenerationServicer):
    """Says the last message again, in two pieces; hangs between them where that is "hang"."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.has_template = True
        self.hanging, self.left = threading.Event(), threading.Event()
        self.server = grpc.server(futures.ThreadPoolExecutor(4), options=SERVER_OPTIONS)
        generation_pb2_grpc.add_GenerationServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def GetModel(  # noqa: N802  # gRPC's spelling
        self, request: generation_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> generation_pb2.GetModelResponse:
        return generation_pb2.GetModelResponse(name="m", has_chat_template=self.has_template)

    def Generate(  # noqa: N802  # gRPC's spelling
        self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        text = request.messages.messages[-1].content
        if text == "too long":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the prompt, limit the context")
        start = generation_pb2.StreamStart(seed=7, max_tokens=2, model_fingerprint="f")
        for index, piece in enumerate((text, "!")):
            if text == "hang" and index == 1:
                context.add_callback(self.left.set)
                self.hanging.set()
                self.left.wait(20)
                return
            yield generation_pb2.GenerateResponse(
                request_id=request.request_id,
                start=None if index else start,
                delta=generation_pb2.Delta(text=piece, token_ids=[index], token_offset=index),
            )
        yield generation_pb2.GenerateResponse(
            request_id=request.request_id,
            finish=generation_pb2.Finish(
                finish_reason=common_pb2.FINISH_REASON_STOP,
                usage=generation_pb2.Usage(
                    prompt_tokens=9, completion_tokens=2, cached_prompt_tokens=4
                ),
                timings=generation_pb2.Timings(ttft_s=0.25, decode_s=0.05),
            ),
        )


@pytest.fixture
def parrot() -> Iterator[Parrot]:
    server = Parrot()
    yield server
    server.server.stop(0).wait(5)


def chat(monkeypatch: pytest.MonkeyPatch, parrot: Parrot, typed: str, *words: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    monkeypatch.setattr(sys, "argv", ["legato", "chat", *words, "--port", str(parrot.port)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def said(request: generation_pb2.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.messages.messages]


def test_each_turn_knows_those_before_and_has_its_times(
    monkeypatch: pytest.MonkeyPatch, parrot: Parrot, capsys: Captured
) -> None:
    words = ("--system", "s", "--max-tokens", "5", "--temperature", "0")
    assert chat(monkeypatch, parrot, "a\n\nb\\\nc\n/quit\nd\n", *words) == 0
    out, err = capsys.readouterr()
    assert out == "a!\nb\nc!\n"
    assert err.splitlines() == ["[TTFT 250 ms, 20.0 tokens/s, 9 in (4 cached), 2 out]"] * 2
    first, second = parrot.requests
    assert said(first) == [("system", "s"), ("user", "a")]
    assert said(second) == [("system", "s"), ("user", "a"), ("assistant", "a!"), ("user", "b\nc")]
    assert (first.sampling.max_tokens, first.sampling.temperature) == (5, 0)
    assert not first.sampling.HasField("seed")


def test_commands(monkeypatch: pytest.MonkeyPatch, parrot: Parrot, capsys: Captured) -> None:
    assert chat(monkeypatch, parrot, "a\n/clear\nb\n/help\n/clean\n/xyzzy\n") == 0
    out = capsys.readouterr().out
    assert chat_command.HELP in out
    assert "no such command: /clean: did you mean /clear?" in out
    assert "no such command: /xyzzy: /help tells those there are" in out
    assert [said(request) for request in parrot.requests] == [[("user", "a")], [("user", "b")]]


def test_a_turn_that_is_refused_is_not_remembered_and_the_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch, parrot: Parrot, capsys: Captured
) -> None:
    assert chat(monkeypatch, parrot, "a\ntoo long\nb\n") == 0
    out, err = capsys.readouterr()
    assert out == "a!\nb!\n"
    assert "legato: the prompt, limit the context; /clear forgets" in err
    assert [text for _, text in said(parrot.requests[2])] == ["a", "a!", "b"]


def test_ctrl_c_stops_the_answer_and_not_the_chat(
    monkeypatch: pytest.MonkeyPatch, parrot: Parrot, capsys: Captured
) -> None:
    def interrupt() -> None:
        assert parrot.hanging.wait(20)
        time.sleep(0.2)  # until the first piece is shown
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert chat(monkeypatch, parrot, "hang\nb\n") == 0
    thread.join()
    assert parrot.left.wait(5), "its stream goes on"
    out, err = capsys.readouterr()
    assert out == "hang\nb!\n"
    assert "(stopped)" in err
    # What came of it was said.
    assert [text for _, text in said(parrot.requests[1])] == ["hang", "hang", "b"]


def test_a_model_without_a_template_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, parrot: Parrot, capsys: Captured
) -> None:
    parrot.has_template = False
    assert chat(monkeypatch, parrot, "a\n") == 1
    assert "m has no chat template: use `legato generate --raw`" in capsys.readouterr().err
