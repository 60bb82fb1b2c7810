"""GGUF text: the demo model's tokenizer and template, and damaged heads that are only refused."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from demo_model import demo_model_path
from gguf import GGUFWriter
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_models import CHAT_TEMPLATE, byte_alphabet

from legato.cluster.errors import RequestError
from legato.cluster.text.model_text import ModelText
from legato.protos import generation_pb2
from legato.text.gguf_metadata import read_gguf_metadata
from legato.text.word_split import WORD_SPLITS

if TYPE_CHECKING:
    from pathlib import Path

# Bytes that SmolLM's vocabulary has no token for.
LOST_BYTES = b"\x04\x06\x13\x14\x16\x1d\xf1\xf2"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]


@pytest.fixture(scope="module")
def demo() -> ModelText:
    return ModelText.load(demo_model_path())


def write_head(file: Path, **changes: Any) -> Path:  # noqa: ANN401  # metadata values
    """A .gguf of a tokenizer alone; `changes` override keys (None leaves one out)."""
    alphabet = byte_alphabet()
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*(alphabet[byte] for byte in range(256)), "ab", *SPECIAL],
        "token_type": [1] * 257 + [3] * len(SPECIAL),
        "merges": ["a b"],
        "bos_token_id": 257,
        "eos_token_id": 258,
    } | changes
    writer = GGUFWriter(file, "llama")
    for name, value in keys.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.add_chat_template(CHAT_TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_every_text_comes_back(demo: ModelText, text: str) -> None:
    assume(not any(byte in LOST_BYTES for byte in text.encode()))
    assert demo.decode(demo.encode_text(text)) == text


@pytest.mark.parametrize("byte", [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D])
def test_text_that_the_tokens_cannot_spell_is_refused(demo: ModelText, byte: int) -> None:
    message = generation_pb2.ChatMessage(role="user", content=f"ab{chr(byte)}")
    with pytest.raises(RequestError, match=rf"U\+{byte:04X} at character 2, limit"):
        demo.encode_text(f"ab{chr(byte)}")
    with pytest.raises(RequestError, match=rf"U\+{byte:04X}"):
        demo.encode_chat([message])
    with pytest.raises(RequestError, match=r"U\+40000"):
        demo.encode_text("\U00040000")


def test_digits_stand_alone(demo: ModelText) -> None:
    texts = [demo.token_text(token) for token in demo.encode_text("in 12345 or 6")]
    assert texts == ["in", " ", "1", "2", "3", "4", "5", " or", " ", "6"]


def test_what_the_demo_model_says(demo: ModelText) -> None:
    assert demo.eos_token_ids == (2, 0)  # <|im_end|>, <|endoftext|>
    assert demo.num_tokens == 49152
    assert demo.has_chat_template
    assert demo.chat_roles == ("system", "user", "assistant")


def test_the_demo_models_chat_prompt(demo: ModelText) -> None:
    ids = demo.encode_chat([generation_pb2.ChatMessage(role="user", content="Hi 12")])
    assert "".join(map(demo.token_text, ids)) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    ids = demo.encode_chat(
        [
            generation_pb2.ChatMessage(role="system", content="S"),
            generation_pb2.ChatMessage(role="user", content="U"),
        ]
    )
    assert "".join(map(demo.token_text, ids)) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("gpt-2", "ab 123", ["ab", " ", "1", "2", "3"]),
        ("default", "ab", ["ab"]),
        ("smollm", "a1b", ["a", "1", "b"]),
        ("llama-bpe", "abab", ["ab", "ab"]),
        ("qwen2", "ab e\u0301", ["ab", " ", "\ufffd", "\ufffd"]),  # NFC: one é
    ],
)
def test_each_way_of_splitting(tmp_path: Path, pre: str, text: str, tokens: list[str]) -> None:
    model = ModelText.load(write_head(tmp_path / "x.gguf", pre=pre, add_bos_token=False))
    assert [model.token_text(token) for token in model.encode_text(text)] == tokens


WORDS = "Don't HelloWORLDs 12345.67!?\n  x ==1"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["gpt-2"], "Don|'t| HelloWORLDs| 12345|.|67|!?|\n | x| ==|1"),
        (["smollm"], "Don|'t| HelloWORLDs| |1|2|3|4|5|.|6|7|!?|\n | x| ==|1"),
        (
            ["llama-bpe", "llama3", "llama-v3"],
            "Don|'t| HelloWORLDs| |123|45|.|67|!?\n| | x| ==|1",
        ),
        (
            ["qwen2", "deepseek-r1-qwen"],
            "Don|'t| HelloWORLDs| |1|2|3|4|5|.|6|7|!?\n| | x| ==|1",
        ),
        (["tekken"], "Don|'t| Hello|WORLDs| |1|2|3|4|5|.|6|7|!?\n| | x| ==|1"),
        (["default"], "Don|'|t| HelloWORLDs| |123|45|.|67|!?|\n | x| |==|1"),
    ],
)
def test_the_words_of_each_split(names: list[str], words: str) -> None:
    for name in names:
        found = WORD_SPLITS[name].make().pre_tokenize_str(WORDS)
        assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word, _ in found] == words.split("|")


def write_pieces(file: Path, **changes: Any) -> Path:  # noqa: ANN401  # metadata values
    """A .gguf with a SentencePiece tokenizer; `changes` as in `write_head`."""
    pieces = ["▁", "a", "b", "▁a", "▁▁", "▁▁▁", "<t>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    keys = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * 6, 4],
        "scores": [0.0] * 262 + [-1.0, -1e9, -1e9, -1000.0],
        "merges": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return write_head(file, **(keys | changes))


@pytest.mark.parametrize(
    ("prefix", "text", "tokens"),
    [
        (None, "ab", ["▁a", "b"]),
        (True, " ab", ["▁", "▁a", "b"]),
        (False, " ab", ["▁a", "b"]),
        (False, "ab", ["a", "b"]),
        (True, "a   a", ["▁a", "▁▁", "▁a"]),
        (True, "b<t>a", ["▁", "b", "<t>", "▁a"]),
        (False, "é\n", ["<0xC3>", "<0xA9>", "<0x0A>"]),
        (False, "<0x41></s>", [*(f"<0x{byte:02X}>" for byte in b"<0x41></s>")]),
    ],
)
def test_sentencepiece_files(
    tmp_path: Path, prefix: bool | None, text: str, tokens: list[str]
) -> None:
    file = write_pieces(tmp_path / "x.gguf", add_space_prefix=prefix)
    model = ModelText.load(file)
    ids = model.encode_text(text)
    assert ids[0] == 1  # BOS by default
    assert [model.token_text(token) for token in ids[1:]] == [t.replace("▁", " ") for t in tokens]
    # A space in front of what follows an added token is not taken off again.
    assert model.decode(ids) == text.replace("<t>", "<t> " if prefix else "<t>")
    detokenizer = model.detokenizer()
    assert "".join([*map(detokenizer.push, [[i] for i in ids]), detokenizer.flush()]) == (
        model.decode(ids)
    )


@pytest.mark.parametrize(("add_bos", "wanted"), [(None, 1), (True, 1), (False, 0)])
def test_exactly_one_bos_of_sentencepiece(
    tmp_path: Path, add_bos: bool | None, wanted: int
) -> None:
    model = ModelText.load(write_pieces(tmp_path / "x.gguf", add_bos_token=add_bos))
    assert model.encode_text("ab").count(1) == wanted
    assert model.encode_text("<s>ab").count(1) == wanted
    assert model.encode_text("<s>ab", parse_special_tokens=True).count(1) == 1
    message = generation_pb2.ChatMessage(role="user", content="<s></s>")
    ids = model.encode_chat([message])
    assert (ids.count(1), ids.count(2)) == (wanted, 0)


@pytest.mark.parametrize(
    ("pre", "add_bos", "wanted"),
    [("gpt-2", None, 0), ("gpt-2", True, 1), ("llama-bpe", None, 1), ("llama-bpe", False, 0)],
)
def test_exactly_one_bos(tmp_path: Path, pre: str, add_bos: bool | None, wanted: int) -> None:
    model = ModelText.load(write_head(tmp_path / "x.gguf", pre=pre, add_bos_token=add_bos))
    assert model.encode_text("ab").count(257) == wanted
    assert model.encode_text("<s>ab").count(257) == wanted
    assert model.encode_text("<s>ab", parse_special_tokens=True).count(257) == 1
    message = generation_pb2.ChatMessage(role="user", content="<s>")
    assert model.encode_chat([message]).count(257) == wanted


def test_all_ids_that_end_an_answer(tmp_path: Path) -> None:
    model = ModelText.load(write_head(tmp_path / "x.gguf", eot_token_id=260))
    assert model.eos_token_ids == (258, 260, 261)  # EOS, EOT, <|eot_id|> by its name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, "'gpt2' .* and 'llama' .* are supported"),
        ({"model": "llama"}, "scores is missing or no list of numbers"),
        ({"model": "llama", "scores": ["a"]}, "scores is missing or no list of numbers"),
        ({"model": "llama", "scores": [0.5]}, "scores has 1 entries for 262 tokens"),
        ({"model": "llama", "scores": [0.0] * 262, "add_space_prefix": 1}, "not of type bool"),
        (
            {"model": "llama", "scores": [0.0] * 262, "remove_extra_whitespaces": True},
            "remove_extra_whitespaces is set",
        ),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": 3}, "not of type str"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"pre": "nosuch"}, "'nosuch' is not supported"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": [1, 2]}, "no list of strings"),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "merges": ["a a"]}, "'a' twice"),
        ({"token_type": [1]}, "has 1 entries for 262 tokens"),
        ({"token_type": None}, "token_type is missing"),
        ({"merges": ["ab"]}, "not a pair"),
        ({"merges": ["a zz"]}, "does not fit the tokens"),
        ({"bos_token_id": 262}, "bos_token_id is 262; the file has 262 tokens"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
        ({"add_bos_token": 1}, "not of type bool"),
    ],
)
def test_wrong_keys_are_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    file = write_head(tmp_path / "x.gguf", **changes)
    with pytest.raises(ValueError, match=words) as caught:
        ModelText.load(file)
    assert str(file) in str(caught.value)


def test_a_head_cut_anywhere_is_a_value_error(tmp_path: Path) -> None:
    whole = write_head(tmp_path / "x.gguf").read_bytes()
    file = tmp_path / "cut.gguf"
    end = len(whole.rstrip(b"\0"))  # padding behind the head may go
    for size in [*range(64), *range(64, end - 1, 37), end - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            ModelText.load(file)


def test_flipped_bytes_are_harmless_or_value_errors(tmp_path: Path) -> None:
    whole = write_head(tmp_path / "x.gguf").read_bytes()
    file = tmp_path / "flip.gguf"
    chance = random.Random(0)
    num_refused = 0
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        try:
            ModelText.load(file)
        except ValueError as error:
            num_refused += 1
            assert str(file) in str(error), error  # noqa: PT017  # most, not all, are refused
    assert num_refused > 100


def test_the_demo_files_head_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "demo.gguf"
    shutil.copy(demo_model_path(), file)
    for size in (1_000_000, 500_000, 100_000, 5000, 100, 24, 8, 4, 0):
        with file.open("r+b") as opened:
            opened.truncate(size)
        with pytest.raises(ValueError, match=r"demo\.gguf"):
            read_gguf_metadata(file)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"GGML" + bytes(20), "does not start with 'GGUF'"),
        (b"GGUF\x01\0\0\0" + bytes(16), "version 1 is not supported"),
        (b"GGUF\0\0\0\x03" + bytes(16), "big-endian"),
        (b"GGUF\x03\0\0\0" + bytes(8) + b"\xff" * 8, "metadata keys; at most"),
        (b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7) + b"\xff" * 8, "claims"),
    ],
)
def test_heads_that_lie(tmp_path: Path, head: bytes, words: str) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(head)
    with pytest.raises(ValueError, match=words):
        ModelText.load(file)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model there"):
        ModelText.load(tmp_path / "x.gguf")
