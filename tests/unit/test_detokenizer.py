"""Detokenizer: the deltas join to the full decode, and none shows half a character."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from demo_model import demo_model_path
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from text_folders import KINDS, write_folder
from tiny_models import BOS, EOS, write_byte_tokenizer

from legato.cluster.errors import RequestError
from legato.cluster.text.model_text import ModelText
from legato.cluster.text.token_table import TokenTable

if TYPE_CHECKING:
    from collections.abc import Sequence

ALL = ["bytes", "demo", *KINDS]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelText]:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return {
        "bytes": ModelText.load(folder),
        "demo": ModelText.load(demo_model_path()),
        **{
            kind: ModelText.load(write_folder(tmp_path_factory.mktemp(kind), kind))
            for kind in KINDS
        },
    }


def deltas(text: ModelText, token_ids: Sequence[int]) -> list[str]:
    detokenizer = text.detokenizer()
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


def check(text: ModelText, token_ids: Sequence[int]) -> None:
    full = text.decode(token_ids)
    pieces = deltas(text, token_ids)
    assert "".join(pieces) == full
    for end in range(len(pieces)):  # so no U+FFFD, and no other character, is taken back later
        assert full.startswith("".join(pieces[: end + 1]))


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_joined_deltas_equal_the_full_decode(
    texts: dict[str, ModelText], kind: str, data: st.DataObject
) -> None:
    text = texts[kind]
    anything = st.integers(min_value=-1, max_value=text.num_tokens + 40)
    small = st.integers(min_value=0, max_value=300)  # specials and single bytes of most kinds
    check(text, data.draw(st.lists(anything | small, max_size=40)))


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=40, deadline=None)
@given(written=st.text(max_size=30), cut=st.integers(0, 30))
def test_real_texts_and_their_beginnings(
    texts: dict[str, ModelText], kind: str, written: str, cut: int
) -> None:
    text = texts[kind]
    try:
        ids = text.encode_text(written)
    except RequestError:  # what the demo model cannot spell
        assume(False)
    check(text, ids)
    check(text, ids[:cut])
    check(text, ids[cut:])


def test_an_emoji_of_four_byte_tokens_comes_whole(texts: dict[str, ModelText]) -> None:
    ids = list("a🙂b".encode())
    assert deltas(texts["bytes"], ids) == ["a", "", "", "", "🙂", "b", ""]


def test_a_broken_emoji_is_shown_as_soon_as_it_is_broken(texts: dict[str, ModelText]) -> None:
    ids = [*"🙂".encode()[:3], ord("b")]
    assert deltas(texts["bytes"], ids) == ["", "", "", "\ufffdb", ""]


def test_an_emoji_cut_by_the_end_is_shown_at_the_end(texts: dict[str, ModelText]) -> None:
    ids = list("🙂".encode()[:3])
    assert deltas(texts["bytes"], ids) == ["", "", "", "\ufffd"]
    assert texts["bytes"].decode(ids) == "\ufffd"


def test_specials_inside_a_character_do_not_break_it(texts: dict[str, ModelText]) -> None:
    first, *rest = "é".encode()
    assert deltas(texts["bytes"], [first, BOS, 319, *rest, EOS]) == ["", "", "", "é", "", ""]


def test_byte_tokens_of_sentencepiece(texts: dict[str, ModelText]) -> None:
    text = texts["sentencepiece_bpe"]
    ids = text.encode_text("x🦊y")
    assert any(text.token_text(token).startswith("<0x") for token in ids)
    pieces = deltas(text, ids)
    assert "".join(pieces) == "x🦊y"
    assert "\ufffd" not in "".join(pieces)


def test_text_comes_with_its_token_where_nothing_is_uncertain(
    texts: dict[str, ModelText],
) -> None:
    for kind in ALL:
        ids = texts[kind].encode_text("The quick brown fox")
        pieces = deltas(texts[kind], ids)
        assert len([piece for piece in pieces if piece]) >= len(ids) - 1, kind
        assert pieces[-1] == "", kind


@pytest.mark.parametrize("kind", ["sentencepiece_bpe", "byte_level"])
@pytest.mark.parametrize("what", ["text", "bytes", "specials"])
def test_the_work_grows_with_the_answer_not_with_its_square(
    texts: dict[str, ModelText], kind: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = texts[kind]
    ids = {
        "text": text.encode_text("the lazy dog "),
        "bytes": text.encode_text("x🦊y" if kind == "byte_level" else "🦊🦊")[1:],
        "specials": text.encode_text("<s>a", parse_special_tokens=True),
    }[what]
    joined = 0
    join = TokenTable.join

    def counted(table: TokenTable, tokens: Sequence[str]) -> str:
        nonlocal joined
        joined += len(tokens)
        return join(table, tokens)

    monkeypatch.setattr(TokenTable, "join", counted)
    long = (ids * 3000)[:3000]
    deltas(text, long)
    assert joined < 40 * len(long)


def test_a_long_run_of_bytes_costs_little(texts: dict[str, ModelText]) -> None:
    text = texts["sentencepiece_bpe"]
    byte = next(i for i in range(text.num_tokens) if text.token_text(i) == "<0xF0>")
    check(text, [byte] * 500)
    assert len(os.fsencode(text.decode([byte] * 500))) >= 500
