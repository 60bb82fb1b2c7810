"""Answers as they come, and the table of their times."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from legato.cluster.cli.answer import Answer, InTurn, percentile, read_answer
from legato.cluster.cli.timing_table import timing_rows, timing_table
from legato.cluster.client import Finished, Tokens
from legato.protos import generation_pb2


def test_of_several_answers_the_first_unfinished_is_shown_as_it_comes() -> None:
    out: list[str] = []
    shown = InTurn(3, out.append)
    for index, text in ((1, "b"), (0, "a"), (1, ""), (2, "c")):
        shown.take(index, text)
    assert "".join(out) == "[1 of 3]\na"
    shown.take(0, "")
    assert "".join(out) == "[1 of 3]\na\n\n[2 of 3]\nb\n\n[3 of 3]\nc"
    shown.take(2, "d")
    assert out[-1] == "d"


def test_tokens_that_share_a_message_share_its_gap() -> None:
    times = iter([0.0, 1.0, 3.0, 3.0])
    events = [
        Tokens(0, "", (1,), 0),
        Tokens(0, "x", (2, 3), 1),
        Finished(0, generation_pb2.Finish()),
    ]
    answer = read_answer(events, lambda _: None, clock=lambda: next(times))
    assert answer.token_times_s == [1.0, 2.0, 3.0]
    assert answer.ttft_s == 1.0
    assert answer.gaps_s == [1.0, 1.0]
    assert answer.text == "x"


def test_percentile_is_a_measured_value() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_timing_rows_of_one_token_have_no_decode_rate() -> None:
    answer = Answer(token_ids=[1], token_times_s=[0.1], finish=generation_pb2.Finish())
    names = [row[0] for row in timing_rows(answer)]
    assert "inter-token latency" not in names
    assert "KV handed over" in names
    with pytest.raises(ValueError, match="not finished"):
        timing_rows(Answer())


def test_the_timings_say_how_often_an_answer_was_preempted() -> None:
    finish = generation_pb2.Finish()
    assert "  preempted" not in [row[0] for row in timing_rows(Answer(finish=finish))]
    finish.timings.preemptions = 2
    assert ("  preempted", "2 times", "for want of KV room") in timing_rows(Answer(finish=finish))


def test_the_decode_rate_is_not_that_at_which_a_late_client_found_the_tokens() -> None:
    finish = generation_pb2.Finish(
        usage=generation_pb2.Usage(completion_tokens=3),
        timings=generation_pb2.Timings(decode_s=0.5),
    )
    answer = Answer(token_ids=[1, 2, 3], token_times_s=[0.9, 0.9, 0.900001], finish=finish)
    rows = {row[0]: row[1] for row in timing_rows(answer)}
    assert rows["decode rate"] == "4.0 tokens/s"


def test_the_phases_of_an_answer_that_moved_are_no_parts_of_its_first_tokens_time() -> None:
    finish = generation_pb2.Finish()
    times = finish.timings
    times.attempts, times.retargets, times.moves = 3, 1, 2
    times.ttft_s, times.prefill_s, times.decode_s, times.total_s = 0.2699, 0.3292, 1.0, 1.3292
    rows = timing_rows(Answer(finish=finish))
    names = [name for name, _, _ in rows]
    assert names[:4] == ["time to first token", "queue", "ticket", "prefill"]
    assert ("  moved", "once", "after a loss: KV was computed again") in rows
    assert ("  sent again", "once", "to another decode worker") in rows
    assert ("  moved with KV", "2 times", "its decode worker drained") in rows
    times.Clear()
    times.attempts = 1
    names = [name for name, _, _ in timing_rows(Answer(finish=finish))]
    assert names[:4] == ["time to first token", "  queue", "  ticket", "  prefill"]
    assert "  moved" not in names


def test_no_line_of_the_table_is_wrapped_or_ends_in_blanks() -> None:
    finish = generation_pb2.Finish()
    finish.timings.kv_transfer_s = 123.456
    out = io.StringIO()
    Console(file=out, width=40).print(timing_table(Answer(finish=finish)), soft_wrap=True)
    lines = out.getvalue().splitlines()
    assert len(lines) == len(timing_rows(Answer(finish=finish)))
    assert all(line == line.rstrip() for line in lines)
