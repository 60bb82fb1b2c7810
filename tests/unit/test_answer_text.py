"""AnswerText: stop strings over tokens, min_tokens, and what is held back at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import EOS, IM_END, write_byte_tokenizer

from legato.cluster.answer import Answer
from legato.cluster.request import RequestSpec
from legato.cluster.text.answer_text import AnswerText
from legato.cluster.text.model_text import ModelText
from legato.protos import common_pb2, worker_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return ModelText.load(folder)


def run(
    model: ModelText, ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0, step: int = 1
) -> tuple[list[str], int, str | None]:
    """Deltas, the last from `finish`; tokens consumed; what stopped it."""
    answer = AnswerText(model, stop, min_tokens)
    deltas = []
    consumed = 0
    for start in range(0, len(ids), step):
        delta = answer.push(ids[start : start + step])
        deltas.append(delta.text)
        consumed += delta.num_tokens_consumed
        assert delta.stop == answer.stop
        if delta.stop is not None:
            break
    deltas.append(answer.finish())
    assert answer.num_tokens == consumed
    return deltas, consumed, answer.stop


@pytest.mark.parametrize("step", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("stop", "text", "consumed", "matched"),
    [
        (["STOP"], "ab", 6, "STOP"),
        (["TOPc"], "abS", 7, "TOPc"),
        (["STOPX"], "abSTOP", 6, None),  # ended by length: all is flushed
        (["ST", "STOP"], "ab", 4, "ST"),
        (["cd"], "abSTOP", 6, None),
        ([], "abSTOP", 6, None),
        (["a"], "", 1, "a"),
    ],
)
def test_the_script(
    model: ModelText, stop: list[str], text: str, consumed: int, matched: str | None, step: int
) -> None:
    script = b"abSTOPcd" if matched else b"abSTOP"
    deltas, num_tokens, found = run(model, script, stop, step=step)
    assert ("".join(deltas), num_tokens, found) == (text, consumed, matched)
    for end in range(len(deltas)):
        assert text.startswith("".join(deltas[: end + 1]))


def test_text_of_the_prompt_never_counts(model: ModelText) -> None:
    # The prompt ended in "abST"; the answer goes on with "OPcd".
    assert run(model, b"OPcd", ["STOP"]) == (["O", "P", "c", "d", ""], 4, None)


@pytest.mark.parametrize(
    ("min_tokens", "text", "consumed"),
    [
        (0, "", 2),
        (2, "", 2),  # the second token completes it, and two tokens are there
        (3, "abab"[:2], 4),  # passed over once
        (4, "ab", 4),
        (5, "ababc", 5),
    ],
)
def test_min_tokens_and_a_stop_string(
    model: ModelText, min_tokens: int, text: str, consumed: int
) -> None:
    deltas, num_tokens, _ = run(model, b"ababc", ["ab"], min_tokens)
    assert ("".join(deltas), num_tokens) == (text, consumed)


def test_a_stop_string_that_begins_before_min_tokens_counts(model: ModelText) -> None:
    deltas, num_tokens, stop = run(model, b"xSTOPy", ["STOP"], min_tokens=4)
    assert ("".join(deltas), num_tokens, stop) == ("x", 5, "STOP")


def test_special_tokens_count_but_have_no_text(model: ModelText) -> None:
    deltas, num_tokens, stop = run(model, [ord("S"), IM_END, ord("T"), EOS], ["ST"], min_tokens=3)
    assert ("".join(deltas), num_tokens, stop) == ("", 3, "ST")


def test_a_stop_string_in_the_middle_of_many_tokens(model: ModelText) -> None:
    answer = AnswerText(model, ["ST"])
    delta = answer.push(b"abSTOP")
    assert (delta.text, delta.num_tokens_consumed, delta.stop) == ("ab", 4, "ST")
    assert answer.push(b"x").num_tokens_consumed == 0
    assert answer.finish() == ""


def test_a_stop_string_of_an_emoji_in_four_tokens(model: ModelText) -> None:
    deltas, num_tokens, stop = run(model, "a🙂b".encode(), ["🙂"])
    assert ("".join(deltas), num_tokens, stop) == ("a", 5, "🙂")


def test_half_a_character_at_the_end_can_complete_a_stop_string(model: ModelText) -> None:
    deltas, num_tokens, stop = run(model, b"ab\xf0\x9f", ["b\ufffd"])
    assert ("".join(deltas), num_tokens, stop) == ("a", 4, "b\ufffd")


def test_nothing_is_taken_after_the_end(model: ModelText) -> None:
    answer = AnswerText(model, ["ab"])
    assert answer.push(b"xa").text == "x"
    assert answer.finish() == "a"
    assert answer.finish() == ""
    assert answer.push(b"b").num_tokens_consumed == 0
    assert answer.stop is None


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.sampled_from([*b"ab", *"é🙂".encode(), EOS, 300]), max_size=20),
    stop=st.lists(st.text(st.sampled_from("abé🙂\ufffd"), min_size=1, max_size=3), max_size=3),
    step=st.integers(1, 6),
    min_tokens=st.integers(0, 3),
)
def test_any_answer_against_the_full_decode(
    model: ModelText, ids: list[int], stop: list[str], step: int, min_tokens: int
) -> None:
    deltas, consumed, matched = run(model, ids, stop, min_tokens, step)
    text = "".join(deltas)
    whole = model.decode(ids)
    assert whole.startswith(text)
    if matched is None:
        assert text == whole
        assert consumed == len(ids)
    else:
        assert matched in stop
        assert consumed >= min(min_tokens, len(ids))
        # What was consumed spells the text and the stop string; one token less does not.
        assert model.decode(ids[:consumed]).startswith(text + matched)
    if min_tokens == 0:
        ends = [whole.find(s) + len(s) for s in stop if s in whole]
        assert (matched is None) == (not ends)
        assert matched is None or len(text + matched) == min(ends)


def test_the_finish_reason_of_a_stop_string_that_only_the_end_completes(model: ModelText) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=3, stop=["b\ufffd"])
    spec = RequestSpec("r", (1,), sampling, ("b\ufffd",), (), batch_priority=False, cache_salt="")
    answer = Answer(spec, AnswerText(model, spec.stop))
    ids = b"ab\xf0"
    delta = answer.take(
        [worker_pb2.SampledToken(token_id=token, index=i) for i, token in enumerate(ids)],
        finished=True,
    )
    assert (delta.text, list(delta.token_ids), answer.stopped_by) == ("a", list(ids), "b\ufffd")
