"""`legato generate` against a service of canned answers, in this process."""

from __future__ import annotations

import errno
import io
import json
import sys
from typing import TYPE_CHECKING

import pytest

from legato.protos import common_pb2

if TYPE_CHECKING:
    from canned_service import CannedService, Runner

Captured = pytest.CaptureFixture[str]


def test_generate_prints_the_answer_and_nothing_else(
    run: Runner, service: CannedService, capsys: Captured
) -> None:
    assert run("generate", "hello", "--max-tokens", "5", "--seed", "0", "--stop", "x") == 0
    assert capsys.readouterr().out == "two wörds\n"
    request = service.requests[0]
    assert [(m.role, m.content) for m in request.messages.messages] == [("user", "hello")]
    assert (request.sampling.max_tokens, list(request.sampling.stop)) == (5, ["x"])
    assert request.sampling.HasField("seed")  # an explicit zero is a value
    assert not request.sampling.HasField("temperature")


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_generate_says_that_its_deadline_passed(
    run: Runner, service: CannedService, capsys: Captured, num_tokens: int
) -> None:
    service.hangs_before = num_tokens
    assert run("generate", "hello", "--raw", "--timeout", "0.3") == 1
    out, err = capsys.readouterr()
    assert out == ["", "two "][num_tokens]
    assert err == (
        "legato: the deadline of 0.3 s passed before the answer ended "
        f"(tokens until then: {num_tokens})\n"
    )


def test_generate_is_raw_where_there_is_no_template_or_on_demand(
    run: Runner, service: CannedService
) -> None:
    service.has_template = False
    assert run("generate", "a") == 0
    service.has_template = True
    assert run("generate", "b", "--raw") == 0
    assert run("generate", "c", "--chat", "--system", "s") == 0
    assert [request.text for request in service.requests] == ["a", "b", ""]
    assert [m.role for m in service.requests[2].messages.messages] == ["system", "user"]


def test_generate_as_json(run: Runner, capsys: Captured) -> None:
    assert run("generate", "hello", "--json", "--stats") == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert (answer["text"], answer["token_ids"]) == ("two wörds", [0, 1])
    assert answer["usage"]["completion_tokens"] == 2
    assert "forward passes" in captured.err


def test_generate_prints_several_answers_apart(
    run: Runner, service: CannedService, capsys: Captured
) -> None:
    assert run("generate", "hello", "--n", "3", "--priority", "batch") == 0
    assert capsys.readouterr().out == (
        "[1 of 3]\ntwo wörds\n\n[2 of 3]\n1two 1wörds\n\n[3 of 3]\n2two 2wörds\n"
    )
    assert (service.requests[0].n, service.requests[0].priority) == (3, common_pb2.PRIORITY_BATCH)
    assert run("generate", "hello", "--n", "2", "--json", "--stats") == 0
    captured = capsys.readouterr()
    answers = json.loads(captured.out)["answers"]
    assert [answer["text"] for answer in answers] == ["two wörds", "1two 1wörds"]
    assert [answer["usage"]["seed"] for answer in answers] == [7, 8]
    assert captured.err.count("forward passes") == 2
    assert "2 of 2" in captured.err


def test_a_refusal_of_several_answers_prints_none(run: Runner, capsys: Captured) -> None:
    assert run("generate", "hello", "--n", "2", "--temperature", "-1") == 2
    assert capsys.readouterr().out == ""


def test_a_refusal_is_one_line_on_stderr(run: Runner, capsys: Captured) -> None:
    assert run("generate", "hello", "--temperature", "-1") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "legato: --temperature is -1, limit [0, 100]\n"


@pytest.mark.parametrize(
    ("details", "said"),
    [
        ("sampling.stop[1] is empty", "--stop is empty"),
        ("sampling.guide.json_schema is no JSON", "--json-schema is no JSON"),
        ("guide.regex is '('", "--regex is '('"),
        ("sampling.guide.choice.texts[3] is empty", "--choice is empty"),
        ("sampling.max_tokens is 9, limit 4", "--max-tokens is 9, limit 4"),
        ("messages[0].content is empty", "messages[0].content is empty"),
    ],
)
def test_a_refused_field_is_told_of_as_the_option_that_was_typed(
    run: Runner, service: CannedService, capsys: Captured, details: str, said: str
) -> None:
    service.refusal = details
    assert run("generate", "hello") == 2
    assert capsys.readouterr().err == f"legato: {said}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--regex", "a", "--choice", "b"],
        ["--json-schema", "no/such/file"],
        ["--raw", "--system", "s"],
        ["--token-file", "no/such/file"],
    ],
)
def test_options_that_cannot_be_are_the_callers_mistake(
    run: Runner, service: CannedService, capsys: Captured, words: list[str]
) -> None:
    assert run("generate", "hello", *words) == 2
    assert words[0 if words[0] != "--raw" else 1] in capsys.readouterr().err
    assert not service.requests


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--max-tokens", "99999999999"], "'--max-tokens'"),
        (["--top-k", "99999999999"], "'--top-k'"),
        (["--seed", str(2**64)], "'--seed'"),
        (["--timeout", "inf"], "'--timeout'"),
        (["--timeout", "nan"], "'--timeout'"),
    ],
)
def test_a_number_that_no_request_can_hold_is_refused_by_name(
    run: Runner, service: CannedService, capsys: Captured, words: list[str], complaint: str
) -> None:
    assert run("generate", "hello", *words) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert not service.requests


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["\udcff"], "the prompt"),
        (["a", "--system", "b\udcff"], "--system"),
        (["a", "--stop", "b", "--stop", "\udcff"], "--stop"),
    ],
)
def test_text_that_is_no_utf8_is_refused(
    run: Runner, capsys: Captured, words: list[str], name: str
) -> None:
    assert run("generate", *words) == 2
    assert capsys.readouterr().err.startswith(f"legato: {name} is no UTF-8 text")


@pytest.mark.parametrize(
    ("stdin", "complaint"),
    [
        (None, "the prompt is to be read from standard input, which is closed"),
        (io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8"), "the prompt is no UTF-8 text"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_said(
    run: Runner,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    stdin: io.TextIOWrapper | None,
    complaint: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run("generate", "-") == 2
    assert capsys.readouterr().err.startswith(f"legato: {complaint}")


def test_an_answer_that_cannot_be_written_is_said(
    run: Runner, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert run("generate", "hello") == 1
    error = capsys.readouterr().err
    assert error == "legato: the answer cannot be written: No space left on device\n"
