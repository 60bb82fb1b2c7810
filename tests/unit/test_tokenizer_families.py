"""Each family's tokenizer folder: the ids and texts of transformers' AutoTokenizer."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from text_folders import SPECIAL, write_folder
from transformers import AutoTokenizer

from legato.cluster.errors import RequestError
from legato.cluster.text.model_text import ModelText
from legato.protos import generation_pb2
from legato.text.hf_class import tokenizer_class

if TYPE_CHECKING:
    from pathlib import Path

LEGACY = {"legacy": True, "add_bos_token": True}
# Kind of tokenizer.json, tokenizer_class, config.json's model_type, more of the config.
FAMILIES: dict[str, tuple[str, str | None, str | None, dict[str, Any]]] = {
    "llama 2": ("sentencepiece_bpe", "LlamaTokenizer", "llama", {"add_bos_token": True}),
    "llama 2, legacy": ("sentencepiece_bpe", "LlamaTokenizerFast", "llama", LEGACY),
    "llama 2, null": ("sentencepiece_bpe", "LlamaTokenizer", None, {"legacy": None}),
    "tinyllama": (
        "metaspace_bpe",
        "LlamaTokenizer",
        "llama",
        {"add_bos_token": True, "legacy": False},
    ),
    "llama, no prefix": (
        *("metaspace_bpe", "LlamaTokenizerFast", "llama"),
        {"add_prefix_space": False},
    ),
    "mistral": ("sentencepiece_bpe", "LlamaTokenizer", "mistral", {"add_bos_token": True}),
    "mistral nemo": ("byte_level", "PreTrainedTokenizerFast", "mistral", {}),
    "llama 3": ("byte_level", "PreTrainedTokenizerFast", "llama", {}),
    "llama 3, old class": ("byte_level", "LlamaTokenizerFast", "llama", {}),
    "smollm": ("byte_level", "GPT2Tokenizer", "llama", {}),
    "gpt2": ("byte_level", "GPT2TokenizerFast", "gpt2", {}),
    "gpt2, no class": ("byte_level", None, "gpt2", {}),
    "gpt2, prefix": ("byte_level", "GPT2Tokenizer", "gpt2", {"add_prefix_space": True}),
    "qwen2": ("byte_level_nfc", "Qwen2Tokenizer", "qwen2", {}),
    "qwen2, other split": ("byte_level", "PreTrainedTokenizerFast", "qwen2", {}),
    "qwen2, old class": ("byte_level", "LlamaTokenizerFast", "qwen2", {}),
    "qwen3": ("byte_level_nfc", "Qwen2TokenizerFast", "qwen3", {}),
    "qwen3, other class": ("byte_level", "LlamaTokenizerFast", "qwen3", {}),
    "gemma 3": ("gemma_bpe", "GemmaTokenizer", "gemma3_text", {"add_bos_token": True}),
    "gemma 3, other file": ("sentencepiece_bpe", "GemmaTokenizerFast", "gemma3_text", {}),
    "gemma 3, generic": ("gemma_bpe", "PreTrainedTokenizerFast", "gemma3_text", {}),
}
PIECES = st.sampled_from(
    (
        *(" ", "  ", "\n", "\t", "▁", "a", "the", " the", "fox", "é", "e\u0301", "🦊", "你"),
        *("<0x41>", "</s>", "1", "23", "'s", "\u00a0", "\u200d", "<", "|", "\x00"),
    )
)
TEXTS = st.text(max_size=40) | st.lists(PIECES, max_size=25).map("".join)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401  # a cached function
    @cache
    def load(family: str) -> tuple[ModelText, Any]:
        kind, name, model_type, config = FAMILIES[family]
        folder = write_folder(
            tmp_path_factory.mktemp("family"), kind, bos_by_processor="add_bos_token" in config,
            model_type=model_type, tokenizer_class=name, **config,
        )  # fmt: skip
        return ModelText.load(folder), AutoTokenizer.from_pretrained(folder)

    return load


def user(*contents: str) -> list[generation_pb2.ChatMessage]:
    return [generation_pb2.ChatMessage(role="user", content=content) for content in contents]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_ids_and_texts(pair: Any, family: str, text: str) -> None:  # noqa: ANN401
    assume(not text.startswith("<s>"))  # transformers begins it twice, and we never do
    # Gemma's class adds these where the file lacks them, under ids that the model has no row for.
    assume("<pad>" not in text and "<mask>" not in text)
    ours, theirs = pair(family)
    ids = ours.encode_text(text, parse_special_tokens=True)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    chat = [{"role": "user", "content": re.sub("|".join(map(re.escape, SPECIAL)), "", text)}]
    wanted = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(user(chat[0]["content"])) == wanted


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids_decode_as_transformers_does(
    pair: Any,  # noqa: ANN401
    family: str,
    data: st.DataObject,
) -> None:
    ours, theirs = pair(family)
    anything = st.integers(0, ours.num_tokens - 1)
    small = st.integers(0, 270)  # control tokens and single bytes
    ids = data.draw(st.lists(anything | small, max_size=30))
    whole = theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids) == whole
    detokenizer = ours.detokenizer()
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join([*pieces, detokenizer.flush()]) == whole


def test_the_class_changes_ids(pair: Any) -> None:  # noqa: ANN401
    """Or the comparisons above would not see that it is followed."""
    first, always = pair("llama 2")[0], pair("llama 2, legacy")[0]
    asis = pair("mistral")[0]
    texts = ["fox</s>fox", " fox"]
    by_class = [
        [model.encode_text(text, parse_special_tokens=True) for text in texts]
        for model in (first, always, asis)
    ]
    assert by_class[0][0] != by_class[1][0] == by_class[2][0]
    assert by_class[0][1] == by_class[1][1] != by_class[2][1]


@pytest.mark.parametrize("family", ["llama 2", "llama 2, legacy", "mistral"])
def test_one_space_goes_from_the_start_and_none_from_inside(
    pair: Any,  # noqa: ANN401
    family: str,
) -> None:
    ours, _ = pair(family)
    ids = ours.encode_text("fox  fox fox")
    detokenizer = ours.detokenizer()
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join([*pieces, detokenizer.flush()]) == "fox  fox fox"
    assert not "".join(pieces).startswith(" ")
    # Only the start of the answer is one: a fresh detokenizer of the rest would strip again.
    assert ours.decode(ids[1:]) == "fox  fox fox"


def test_an_emoji_of_byte_tokens_comes_whole_and_broken_ones_are_marked(
    pair: Any,  # noqa: ANN401
) -> None:
    ours, theirs = pair("llama 2")
    ids = ours.encode_text("a🦊b")
    four = [i for i in ids if ours.token_text(i).startswith("<0x")]
    assert len(four) == 4
    end = ids[-1]
    for given_ids, text in (
        ([*four, end], "🦊b"),
        (four, "🦊"),
        ([*four[:3], end], "\ufffd\ufffd\ufffdb"),
        (four[:3], "\ufffd\ufffd\ufffd"),
        ([*four, four[0], end], "\ufffd" * 5 + "b"),  # one wrong byte spoils the run
        ([four[1], end, *four], "\ufffdb🦊"),
    ):
        assert theirs.decode(given_ids, skip_special_tokens=True) == text
        detokenizer = ours.detokenizer()
        pieces = [detokenizer.push([token_id]) for token_id in given_ids]
        assert "".join([*pieces, detokenizer.flush()]) == text
        assert not any(pieces[: min(len(given_ids) - 1, 3)]) or given_ids[1] == end


# Without words to cut, the whole text is merged at once.
@pytest.mark.parametrize(("family", "char"), [("llama 2", "a"), ("gemma 3", " ")])
def test_a_megabyte_of_one_character(pair: Any, family: str, char: str) -> None:  # noqa: ANN401
    ours, _ = pair(family)
    text = char * 1_000_000
    ids = ours.encode_text(text)
    assert ours.decode(ids) == text


@pytest.mark.parametrize("kind", ["sentencepiece_bpe", "metaspace_bpe", "gemma_bpe"])
@pytest.mark.parametrize("name", ["LlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizerFast"])
def test_control_strings_stay_text_beside_the_templates(
    tmp_path: Path, kind: str, name: str
) -> None:
    folder = write_folder(tmp_path, kind, bos_by_processor=True, tokenizer_class=name)
    ours, theirs = ModelText.load(folder), AutoTokenizer.from_pretrained(folder)
    bos, end = theirs.convert_tokens_to_ids(["<s>", "<|im_end|>"])
    ids = ours.encode_chat(user("x<|im_end|>\n<s> y", "</s>"))
    assert (ids.count(bos), ids.count(end)) == (1, 2)
    assert ids[0] == bos
    plain = theirs("x<|im_end|>\n<s> y", split_special_tokens=True)["input_ids"]
    theirs._tokenizer.encode_special_tokens = False
    assert ours.encode_text("x<|im_end|>\n<s> y") == plain
    assert ours.encode_text("<s>x")[:1] == [bos]
    assert ours.encode_text("<s>x").count(bos) == 1


def test_text_that_no_token_spells_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "metaspace_bpe", tokenizer_class="LlamaTokenizer")
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    vocabulary = state["model"]["vocab"]
    vocabulary["<0xG0>"] = vocabulary.pop("<0xA6>")
    path.write_text(json.dumps(state))
    model = ModelText.load(folder)
    assert model.decode(model.encode_text("a b\nĀ")) == "a b\nĀ"
    with pytest.raises(RequestError, match=r"U\+1F98A at character 2, limit"):
        model.encode_text("a 🦊")
    with pytest.raises(RequestError, match=r"U\+1F98A"):
        model.encode_chat(user("🦊"))


def test_control_strings_of_characters_that_no_token_spells(tmp_path: Path) -> None:
    """The unknown token among their ids is no reason to cut them up."""
    folder = write_folder(tmp_path, "sentencepiece_bpe")
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"]["byte_fallback"] = False
    path.write_text(json.dumps(state))
    ours, theirs = ModelText.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("a<|im_end|>b", "<unk>|", "<s>the</s>"):
        plain = theirs(text, split_special_tokens=True)["input_ids"]
        assert 0 in plain
        assert ours.encode_text(text) == plain


@pytest.mark.parametrize("name", ["LlamaTokenizer", "GPT2TokenizerFast"])
def test_a_class_that_cannot_have_the_model_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path, "unigram", tokenizer_class=name)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: tokenizer_class is .* Unigram"):
        ModelText.load(folder)


def test_names_that_a_class_brings(tmp_path: Path) -> None:
    template = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ image_token }}"
    folder = write_folder(
        tmp_path, "sentencepiece_bpe", template=template, tokenizer_class="LlamaTokenizer",
        extra_special_tokens={"image_token": "<|im_start|>"},
    )  # fmt: skip
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for key in ("bos_token", "eos_token", "unk_token"):
        del config[key]
    path.write_text(json.dumps(config))
    ours, theirs = ModelText.load(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "x"}]
    assert ours.encode_chat(user("x")) == theirs.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_special_tokens_without_a_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "byte_level", additional_special_tokens=["the"])
    ours, theirs = ModelText.load(folder), AutoTokenizer.from_pretrained(folder)
    token_id = theirs.convert_tokens_to_ids("the")
    assert ours.decode([token_id]) == theirs.decode([token_id], skip_special_tokens=True) == ""
    assert ours.encode_text("the", parse_special_tokens=True) == theirs.encode("the") == [token_id]


def test_no_class_no_type() -> None:
    assert tokenizer_class({}, {}, byte_level=False) is None
    assert tokenizer_class({"tokenizer_class": 3}, {"model_type": 3}, byte_level=False) is None
    assert tokenizer_class({"tokenizer_class": "BertTokenizer"}, {}, byte_level=False) is None
