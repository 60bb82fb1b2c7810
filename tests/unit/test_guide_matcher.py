"""Guides over vocabularies of every kind: what is allowed, and that only the tokens decide it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from demo_model import demo_model_path
from guide_cases import CASES, JSON_OBJECT, Case, allowed, choice_case, opened, regex_case, walk
from real_tokenizers import NAMES, real_tokenizer, write_gguf_twin
from tiny_models import EOS, IM_END, VOCAB_SIZE, make_llama_folder
from tokenizers import decoders

from legato.cluster.text.model_text import ModelText
from legato.text.guide_book import GuideBook
from legato.text.guide_matcher import GuideError
from legato.text.guide_vocabulary import GuideVocabulary
from legato.text.token_bytes import TokenBytes, token_bytes

if TYPE_CHECKING:
    from pathlib import Path

IDS = [case.name for case in CASES]
# As folders, and as .gguf files, of which one of each kind will do: with scores, and with merges.
IN_GGUF = NAMES if os.environ.get("LEGATO_VOCABULARIES") == "full" else ("llama2", "qwen3")
VOCABULARIES = [
    *(pytest.param(name, False, id=f"{name}-folder") for name in NAMES),
    *(pytest.param(name, True, id=f"{name}-gguf") for name in IN_GGUF),
]


class Model:
    """A model's text as the router has it, and guides as a worker has them, from the same files."""

    def __init__(self, path: Path, beyond: int) -> None:
        """`beyond`: how many logits more, or fewer, than the tokenizer has ids."""
        self.text = ModelText.load(path)
        self.vocab_size = self.text.num_tokens + beyond
        self.book = GuideBook(
            lambda: GuideVocabulary.load(path, self.vocab_size), probe=lambda _: None
        )
        self.eos = self.text.eos_token_ids


@pytest.fixture(scope="module")
def demo() -> Model:
    return Model(demo_model_path(), 0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_llama_folder(tmp_path_factory.mktemp("models") / "tiny"), 60)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_walk_keeps_to_the_guide(demo: Model, tiny: Model, case: Case) -> None:
    for model in (demo, tiny):
        for seed in range(6):
            tokens, _ = walk(opened(model.book, case, model.eos), model.eos, seed)
            assert case.keeps(model.text.decode(tokens)), model.text.decode(tokens)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_is_allowed_follows_from_the_tokens_alone(demo: Model, case: Case) -> None:
    """Who takes an answer over feeds a new matcher, which has seen no mask of what was before."""
    tokens, masks = walk(opened(demo.book, case, demo.eos), demo.eos, seed=4)
    for place, mask in enumerate(masks):
        assert allowed(opened(demo.book, case, demo.eos), tokens[:place]) == mask


@pytest.mark.parametrize(("name", "gguf"), VOCABULARIES)
def test_vocabularies_of_real_models(name: str, gguf: bool, tmp_path: Path) -> None:
    path = write_gguf_twin(name, tmp_path / "twin.gguf") if gguf else real_tokenizer(name)
    model = Model(path, 8)
    control = set(model.text._table._special_ids)
    assert len(control) >= 3
    for case in CASES:
        for seed in range(2):
            tokens, masks = walk(opened(model.book, case, model.eos), model.eos, seed)
            assert case.keeps(model.text.decode(tokens)), (case.name, model.text.decode(tokens))
            for mask in masks:
                assert not (mask - set(model.eos)) & control
                assert max(mask) < model.text.num_tokens


def test_control_tokens_and_ids_without_a_token_are_never_allowed(tiny: Model) -> None:
    mask = allowed(opened(tiny.book, regex_case("anything", r"(?s:.)*"), [EOS]), [])
    assert mask == {*range(0xC0), *range(0xC2, 0xF5), EOS} - set(range(0x80, 0xC0))
    assert len(tiny.text.token_text(IM_END)) > 1


def test_a_vocabulary_larger_than_the_logits(tmp_path: Path) -> None:
    model = Model(make_llama_folder(tmp_path / "tiny"), -60)  # logits of ids below 200
    mask = allowed(opened(model.book, regex_case("anything", r"(?s:.)*"), [10]), [])
    assert max(mask) < 200
    with pytest.raises(ValueError, match="no text that the model can write keeps to it"):
        opened(model.book, choice_case("beyond", "\U0001f98a"), [10])  # begins with byte 240


def test_tokens_of_the_same_bytes_are_all_allowed() -> None:
    vocabulary = GuideVocabulary(TokenBytes([b"a", b"b", b"a", b"ab", b"", b"ab"], False))
    book = GuideBook(lambda: vocabulary)
    case = choice_case("ab", "ab", "b")
    assert allowed(opened(book, case, [4]), []) == {0, 1, 2, 3, 5}
    for first in (0, 2):
        assert allowed(opened(book, case, [4]), [first]) == {1}
    for whole in ([3], [5], [2, 1]):
        assert allowed(opened(book, case, [4]), whole) == {4}


def test_no_mask_is_larger_than_the_logits_need() -> None:
    for size in (31, 32, 33, 63, 64):
        vocabulary = GuideVocabulary(TokenBytes([b"x", b"y", *[b"xy"] * (size - 3), b""], False))
        matcher = opened(
            GuideBook(lambda v=vocabulary: v), regex_case("x or y", "[xy]+"), [size - 1]
        )
        assert allowed(matcher, []) == set(range(size - 1))
        assert allowed(matcher, [0]) == set(range(size))


# How it ends.


def ends_of(
    model: Model, case: Case, tokens: list[int], *, eos: tuple[int, ...] = (EOS,), **more: object
) -> set[int]:
    settings: dict[str, object] = {"stop_token_ids": (), "ignore_eos": False}
    matcher = model.book.open(case.guide, eos_token_ids=eos, **(settings | more))  # type: ignore[arg-type]  # as given
    return allowed(matcher, tokens)


def test_only_an_end_is_left_of_a_complete_text(tiny: Model) -> None:
    yes = choice_case("yes", "yes")
    assert ends_of(tiny, yes, list(b"ye")) == {ord("s")}
    assert ends_of(tiny, yes, list(b"yes")) == {EOS}
    assert ends_of(tiny, yes, list(b"yes"), eos=(EOS, 5)) == {EOS, 5}
    # What adds no text ends it as well; a stop token that is text would make it another text.
    assert ends_of(tiny, yes, list(b"yes"), stop_token_ids=(IM_END, 65)) == {EOS, IM_END}
    assert ends_of(tiny, yes, list(b"yes"), eos=(), stop_token_ids=(IM_END,)) == {IM_END}


def test_ignore_eos_holds_it_back_while_anything_else_may_come(tiny: Model) -> None:
    case = regex_case("a few", "a{1,3}")
    assert ends_of(tiny, case, list(b"a")) == {ord("a"), EOS}
    assert ends_of(tiny, case, list(b"a"), ignore_eos=True) == {ord("a")}
    assert ends_of(tiny, case, list(b"aaa"), ignore_eos=True) == {EOS}
    more = {"ignore_eos": True, "stop_token_ids": (IM_END,)}
    assert ends_of(tiny, case, list(b"a"), **more) == {ord("a"), IM_END}


def test_nothing_that_could_end_it_is_refused(tiny: Model) -> None:
    for eos, stops in (((), ()), ((), (65,)), ((VOCAB_SIZE,), ())):
        with pytest.raises(
            ValueError, match="the model has no EOS token, limit at least 1 control"
        ):
            ends_of(tiny, JSON_OBJECT, [], eos=eos, stop_token_ids=stops)


@pytest.mark.parametrize(
    ("emitted", "what"),
    [
        (b"yex", "token 120 at output position 2 is not what the guide allows there"),
        (b"yes!", "token 33 at output position 3 is not what"),
        ([ord("y"), EOS], f"token {EOS} at output position 1 is no text"),
        ([VOCAB_SIZE + 7], "is no text"),
    ],
)
def test_tokens_that_no_answer_can_have_had(
    tiny: Model, emitted: bytes | list[int], what: str
) -> None:
    matcher = opened(tiny.book, choice_case("yes", "yes"), [EOS])
    with pytest.raises(GuideError, match=what):
        matcher.advance(list(emitted))


# Decoders.


def test_a_decoder_that_does_more_than_join_is_no_ground_for_guides() -> None:
    texts = {0: "a", 1: "##b", 2: "c"}
    with pytest.raises(ValueError, match="WordPiece, which does more than join"):
        token_bytes(texts, frozenset(), decoders.WordPiece(), 3)
    with pytest.raises(ValueError, match="has no decoder"):
        token_bytes(texts, frozenset(), None, 3)
    book = GuideBook(lambda: GuideVocabulary(token_bytes(texts, frozenset(), None, 3)))
    with pytest.raises(ValueError, match=r"sampling.guide: the tokenizer has no decoder: no guide"):
        opened(book, JSON_OBJECT, [0])
