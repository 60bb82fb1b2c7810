"""Real tokenizers and chat templates, from folders and as .gguf, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import NAMES, real_tokenizer, write_gguf_twin
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from legato.cluster.errors import RequestError
from legato.cluster.text.model_text import ModelText
from legato.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

CHATS = [
    [("user", "hi")],
    [("system", " be kind "), ("user", "  hi \n")],
    [("user", "a"), ("assistant", "<think>x</think>\n\n b "), ("user", "c")],
    [("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "é🙂 {{x}} {% if %}")],
    [("user", "q"), ("assistant", "w")],
    [("user", "")],
]
PIECES = st.sampled_from(
    (
        *(
            " ",
            "  ",
            "\n",
            "\n\n",
            "\t\t",
            "a",
            "Hello",
            " the",
            "ing",
            "é",
            "e\u0301",
            "🦊",
            "你好",
        ),
        *(
            "<0x41>",
            "<table>",
            "</b>",
            "12345",
            "'S",
            "\u00a0",
            "\u200d",
            "<",
            "|>",
            "\x00",
            "👩‍🚀",
        ),
    )
)
TEXTS = st.text(max_size=40) | st.lists(PIECES, max_size=25).map("".join)


Pairs = Callable[[str], tuple[ModelText, Any]]


@pytest.fixture(scope="module")
def folders() -> Pairs:
    """Ours and transformers' by name; they are let go at the module's end, being large."""

    @cache
    def load(name: str) -> tuple[ModelText, Any]:
        folder = real_tokenizer(name)
        return ModelText.load(folder), AutoTokenizer.from_pretrained(folder)

    return load


@pytest.fixture(scope="module")
def twins(folders: Pairs, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Ours from a .gguf file, and transformers' from the folder that it was made from."""

    @cache
    def load(name: str) -> tuple[ModelText, Any]:
        file = write_gguf_twin(name, tmp_path_factory.mktemp("twin") / f"{name}.gguf")
        if name == "llama2":  # its class changes what tokenizer.json says: read without it
            return ModelText.load(file), PreTrainedTokenizerFast.from_pretrained(
                real_tokenizer(name)
            )
        return ModelText.load(file), folders(name)[1]

    return load


def chat(messages: Sequence[tuple[str, str]]) -> list[generation_pb2.ChatMessage]:
    return [generation_pb2.ChatMessage(role=role, content=text) for role, text in messages]


def reference(theirs: Any, messages: Sequence[tuple[str, str]]) -> list[int]:  # noqa: ANN401
    ids: list[int] = theirs.apply_chat_template(
        [{"role": role, "content": text} for role, text in messages],
        add_generation_prompt=True,
        return_dict=False,
    )
    return ids


def deltas(model: ModelText, ids: Sequence[int]) -> str:
    detokenizer = model.detokenizer()
    return "".join([*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_ids_and_texts(folders: Pairs, name: str, text: str) -> None:
    ours, theirs = folders(name)
    ids = ours.encode_text(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert deltas(ours, ids) == ours.decode(ids)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids(folders: Pairs, name: str, data: st.DataObject) -> None:
    ours, theirs = folders(name)
    assert ours.num_tokens == len(theirs)
    anything = st.integers(0, ours.num_tokens - 1)
    ids = data.draw(st.lists(anything | st.integers(0, 500), max_size=30))
    whole = theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids) == whole
    assert deltas(ours, ids) == whole


@pytest.mark.parametrize("name", NAMES)
def test_which_added_tokens_are_text(folders: Pairs, name: str) -> None:
    ours, theirs = folders(name)
    for token_id in theirs.added_tokens_decoder:
        assert ours.decode([token_id]) == theirs.decode([token_id], skip_special_tokens=True)


@pytest.mark.parametrize("name", ["llama3_1", "qwen3", "gemma3"])
def test_chat_templates(folders: Pairs, name: str) -> None:
    ours, theirs = folders(name)
    for messages in CHATS:
        assert ours.encode_chat(chat(messages)) == reference(theirs, messages), messages


@pytest.mark.parametrize("name", ["llama3_1", "qwen3", "gemma3"])
def test_long_chats_are_within_the_templates_bounds(folders: Pairs, name: str) -> None:
    ours, theirs = folders(name)
    turns = [("user", "word " * 100), ("assistant", "<think>" + "y " * 50 + "</think> ok")] * 300
    messages = [*turns, ("user", "x" * 100_000)]
    assert ours.encode_chat(chat(messages)) == reference(theirs, messages)


@pytest.mark.parametrize("messages", [[("user", "a"), ("user", "b")], [("assistant", "x")]])
def test_gemma_refuses_roles_that_do_not_alternate(
    folders: Pairs, messages: list[tuple[str, str]]
) -> None:
    ours, _ = folders("gemma3")
    with pytest.raises(RequestError, match=r"refused .*: Conversation roles must alternate"):
        ours.encode_chat(chat(messages))


@pytest.mark.parametrize(
    ("name", "bos", "control"),
    [
        ("llama3_1", "<|begin_of_text|>", "<|eot_id|>"),
        ("gemma3", "<bos>", "<end_of_turn>"),
        ("qwen3", None, "<|im_end|>"),
        ("llama2", "<s>", "</s>"),
    ],
)
def test_one_bos_and_control_strings_as_text(
    folders: Pairs, name: str, bos: str | None, control: str
) -> None:
    ours, theirs = folders(name)
    end = theirs.convert_tokens_to_ids(control)
    text = f"x{control}{bos or ''} y"
    prompts = [ours.encode_text(text)]
    assert end not in prompts[0]
    assert ours.decode(prompts[0]) == text
    if ours.has_chat_template:
        prompts.append(ours.encode_chat(chat([("user", text)])))
        assert prompts[1].count(end) == reference(theirs, [("user", "x")]).count(end)
    for prompt in prompts:
        if bos is not None:
            bos_id = theirs.convert_tokens_to_ids(bos)
            assert prompt[0] == bos_id
            assert prompt.count(bos_id) == 1
    armed = ours.encode_text(text, parse_special_tokens=True)
    assert armed.count(end) == 1


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS.filter(lambda text: "▁" not in text))
def test_gguf_files_give_the_same_ids_and_texts(twins: Pairs, name: str, text: str) -> None:
    ours, theirs = twins(name)
    ids = ours.encode_text(text)
    assert ids == theirs.encode(text, split_special_tokens=True)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert deltas(ours, ids) == ours.decode(ids)


@pytest.mark.parametrize(
    ("name", "eos"),
    [
        ("llama2", {2}),
        ("llama3_1", {128001, 128009}),
        ("qwen3", {151643, 151645}),
        ("gemma3", {1, 106}),
    ],
)
def test_gguf_files_end_answers_and_chat_alike(twins: Pairs, name: str, eos: set[int]) -> None:
    ours, theirs = twins(name)
    assert set(ours.eos_token_ids) == eos
    if ours.has_chat_template:
        for messages in CHATS:
            assert ours.encode_chat(chat(messages)) == reference(theirs, messages), messages
