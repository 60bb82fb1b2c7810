"""Hugging Face folders: the same ids and texts as transformers, and damage that is named."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_folders import KINDS, write_folder
from tiny_models import BOS, EOS, IM_END, IM_START, write_byte_tokenizer
from transformers import AutoTokenizer

from legato.cluster.errors import RequestError
from legato.cluster.text.model_text import ModelText
from legato.protos import generation_pb2

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [
    "",
    " ",
    "The quick brown fox",
    "  two  spaces and a tail ",
    "don't we're I'LL",
    "12345 6.78",
    "Mädchen aß Äpfel, e\u0301 and \u00e9",
    "你好，世界 привет 🙂👩‍🚀 \U0001f1e9\U0001f1ea",
    "line\n\nline\r\n\ttab",
    "\x00\x04\x1d\x7f\ufeff\u200b\ufffd\ue000",
    "a" * 300,
]


def user(content: str) -> list[generation_pb2.ChatMessage]:
    return [generation_pb2.ChatMessage(role="user", content=content)]


@pytest.fixture(scope="module")
def byte_text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return ModelText.load(folder)


@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_every_text_comes_back(byte_text: ModelText, text: str) -> None:
    ids = byte_text.encode_text(text)
    assert ids == list(text.encode())
    assert byte_text.decode(ids) == text


def test_what_the_folder_says(byte_text: ModelText) -> None:
    assert byte_text.eos_token_ids == (EOS,)
    assert byte_text.num_tokens == 260
    assert byte_text.has_chat_template
    assert byte_text.chat_roles == ("system", "user", "assistant")
    assert byte_text.token_text(IM_END) == "<|im_end|>"
    assert byte_text.token_text(300) == "<token 300>"
    assert byte_text.token_text(ord("a")) == "a"
    assert byte_text.decode([BOS, 104, 319, 105, EOS]) == "hi"


def test_the_rendered_chat(byte_text: ModelText) -> None:
    ids = byte_text.encode_chat(user("hi"))
    assert ids == [
        IM_START, *b"user\nhi", IM_END, *b"\n", IM_START, *b"assistant\n",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bos", [False, True])
def test_ids_and_texts_equal_transformers(tmp_path: Path, kind: str, bos: bool) -> None:
    folder = write_folder(tmp_path, kind, bos_by_processor=bos)
    ours, theirs = ModelText.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode_text(text)
        assert ids == theirs.encode(text), (kind, text)
        expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == expected, (kind, text)
        chat = [{"role": "user", "content": text}]
        wanted = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(user(text)) == wanted, (kind, text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bos_by_processor", [False, True])
@pytest.mark.parametrize("add_bos_token", [None, False, True])
def test_exactly_one_bos(
    tmp_path: Path, kind: str, bos_by_processor: bool, add_bos_token: bool | None
) -> None:
    config = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    wanted = bos_by_processor if add_bos_token is None else add_bos_token
    with_bos = write_folder(tmp_path / "a", kind, bos_by_processor=bos_by_processor, **config)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    without = write_folder(
        tmp_path / "b", kind, bos_by_processor=bos_by_processor, template=template, **config
    )
    for folder, template_has_it in ((with_bos, True), (without, False)):
        text = ModelText.load(folder)
        bos = text.encode_text("<s>", parse_special_tokens=True)
        assert len(bos) == 1
        for parse in (False, True):
            ids = text.encode_text("hi", parse_special_tokens=parse)
            assert ids.count(bos[0]) == wanted
            assert (ids[0] == bos[0]) == wanted
            ids = text.encode_chat(user("hi"), parse_special_tokens=parse)
            assert ids.count(bos[0]) == (wanted or template_has_it)
            assert (ids[0] == bos[0]) == (wanted or template_has_it)
        assert text.encode_text("<s>hi", parse_special_tokens=True).count(bos[0]) == 1
        assert text.encode_text("<s>hi").count(bos[0]) == wanted


def change(folder: Path, file: str, **keys: Any) -> None:  # noqa: ANN401  # JSON
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | keys))


@pytest.mark.parametrize(
    ("generation", "model", "eos"),
    [
        (None, None, (EOS,)),
        ([257, 259], 258, (257, 259)),
        (259, None, (259,)),
        ([257, 257], None, (257,)),
        (None, 258, (EOS,)),
    ],
)
def test_where_the_end_comes_from(
    tmp_path: Path, generation: object, model: object, eos: tuple[int, ...]
) -> None:
    write_byte_tokenizer(tmp_path)
    if generation is not None:
        change(tmp_path, "generation_config.json", eos_token_id=generation)
    if model is not None:
        change(tmp_path, "config.json", eos_token_id=model)
    assert ModelText.load(tmp_path).eos_token_ids == eos


@pytest.mark.parametrize(
    ("file", "keys", "words"),
    [
        ("tokenizer_config.json", {"bos_token": "<nosuch>"}, "is not in tokenizer.json"),
        ("tokenizer_config.json", {"bos_token": 3}, "not a string"),
        ("tokenizer_config.json", {"bos_token": "\ud800"}, "surrogates"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "not true or false"),
        ("tokenizer_config.json", {"chat_template": 3}, "neither a string nor a list"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "must be an object"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "wrong entry"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"260": 1}}, "wrong entry"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"259": {"content": "x"}}}, "has id"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"260": {"content": "\ud800"}}}, "surr"),
        ("generation_config.json", {"eos_token_id": "x"}, "an id >= 0"),
        ("generation_config.json", {"eos_token_id": [True]}, "an id >= 0"),
        ("tokenizer.json", {"model": {}}, "tokenizer.json"),
        ("tokenizer.json", {"added_tokens": [{"id": 256}]}, "tokenizer.json"),
    ],
)
def test_wrong_files_are_named(
    tmp_path: Path, file: str, keys: dict[str, object], words: str
) -> None:
    write_byte_tokenizer(tmp_path)
    change(tmp_path, file, **keys)
    with pytest.raises(ValueError, match=words) as caught:
        ModelText.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_files_cut_anywhere_are_value_errors(tmp_path: Path, file: str) -> None:
    write_byte_tokenizer(tmp_path)
    path = tmp_path / file
    whole = path.read_bytes() if path.exists() else b'{"eos_token_id": [257, 259]}'
    for size in range(1, len(whole) - 2, max(1, len(whole) // 40)):
        for damaged in (whole[:size], whole[:size] + b"\xff" + whole[size:]):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=str(tmp_path)):
                ModelText.load(tmp_path)


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"]
)
def test_pipes_are_not_waited_for(tmp_path: Path, file: str) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    with pytest.raises(ValueError, match=re.escape(file)):
        ModelText.load(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_files_without_end_are_not_read(tmp_path: Path, file: str) -> None:
    write_byte_tokenizer(tmp_path)
    with (tmp_path / file).open("ab") as opened:
        opened.truncate(1 << 40)  # takes no disk
    with pytest.raises(ValueError, match=re.escape(f"{file}: is larger than 16777216 bytes")):
        ModelText.load(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: the file is missing"):
        ModelText.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"only a SentencePiece tokenizer\.model"):
        ModelText.load(tmp_path)
    with pytest.raises(ValueError, match="no model there"):
        ModelText.load(tmp_path / "nothing")


def test_templates_have_more_than_one_home(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    change(tmp_path, "tokenizer_config.json", chat_template=named)
    assert ModelText.load(tmp_path).encode_chat(user("x")) == list(b"D")
    change(tmp_path, "tokenizer_config.json", chat_template=[*named[:1], *named[:1]])
    assert ModelText.load(tmp_path).encode_chat(user("x")) == list(b"T")
    (tmp_path / "chat_template.jinja").write_text("J")
    assert ModelText.load(tmp_path).encode_chat(user("x")) == list(b"J")


def test_training_settings_do_not_cut_prompts(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    change(
        tmp_path,
        "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    )
    assert ModelText.load(tmp_path).encode_text("abcd") == list(b"abcd")


NESTED = {"type": "Split", "pattern": {"Regex": "(([a-z]+)+)+!"}, "behavior": "Isolated"}


def test_a_pattern_that_the_tokenizer_gives_up_on_is_an_error(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    parts = [NESTED | {"invert": False}, content["pre_tokenizer"]]
    change(tmp_path, "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": parts})
    text = ModelText.load(tmp_path)
    assert text.encode_text("some words")
    with pytest.raises(RequestError, match=r"cannot be tokenised: .*retry-limit-in-match over"):
        text.encode_text("a" * 100)


def test_a_pattern_that_cannot_take_the_control_tokens_is_refused(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    hostile = "<" + "a" * 60 + ">"
    token = content["added_tokens"][0] | {"content": hostile, "id": 400}
    change(tmp_path, "tokenizer.json", added_tokens=[*content["added_tokens"], token])
    parts = [NESTED | {"invert": False}, content["pre_tokenizer"]]
    change(tmp_path, "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": parts})
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*retry-limit-in-match over"):
        ModelText.load(tmp_path)


def test_a_decoder_that_gives_up_is_an_error(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    replace = {"type": "Replace", "pattern": NESTED["pattern"], "content": ""}
    change(
        tmp_path,
        "tokenizer.json",
        decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}, replace]},
    )
    text = ModelText.load(tmp_path)
    ids = text.encode_text("a" * 100)
    with pytest.raises(ValueError, match=r"its decoder failed: .*retry-limit-in-match over"):
        text.decode(ids)


@pytest.mark.parametrize("odd", ["n" * 3_000_000, "a\nb\x1b[31m\u202ec\r"], ids=["long", "odd"])
@pytest.mark.parametrize("key", ["bos_token", "extra_special_tokens", "add_bos_token", "x_token"])
def test_messages_are_short_and_on_one_line(tmp_path: Path, odd: str, key: str) -> None:
    write_byte_tokenizer(tmp_path)
    value = {"x_token": {"content": [odd]}}.get(key, odd)
    name = odd + "_token" if key == "x_token" else key
    change(tmp_path, "tokenizer_config.json", **{name: value})
    with pytest.raises(ValueError, match=r"is |has ") as caught:
        ModelText.load(tmp_path)
    assert len(str(caught.value)) < 2000
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("odd", ["n" * 3_000_000, "a\nb\x1b[31m\u202ec\r"], ids=["long", "odd"])
def test_a_message_of_the_library_or_of_a_template_is_too(tmp_path: Path, odd: str) -> None:
    write_byte_tokenizer(tmp_path)
    change(
        tmp_path,
        "tokenizer_config.json",
        chat_template="{{ raise_exception('x'~bos_token) }}",
        bos_token=odd,
        added_tokens_decoder={"400": {"content": odd, "special": True}},
    )
    messages = []
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    token = content["added_tokens"][0] | {"content": odd, "id": 400}
    change(tmp_path, "tokenizer.json", added_tokens=[*content["added_tokens"], token])
    with pytest.raises((ValueError, RequestError)) as caught:
        ModelText.load(tmp_path).encode_chat(user("hi"))
    messages.append(str(caught.value))
    change(tmp_path, "tokenizer.json", pre_tokenizer={"type": odd})
    with pytest.raises(ValueError, match=r"tokenizer\.json: ") as refused:
        ModelText.load(tmp_path)
    messages.append(str(refused.value))
    assert all(len(message) < 2000 and message.isprintable() for message in messages)
