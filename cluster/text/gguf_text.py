"""GGUF text: the tokenizer, special tokens and chat template in a .gguf file's metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from legato.cluster.text.gguf_metadata import read_gguf_metadata
from legato.cluster.text.text_parts import TextParts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from legato.cluster.text.gguf_metadata import GgufValue

Scalar = TypeVar("Scalar", str, int, bool)

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# Llama 3's and Qwen 2's split differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Control tokens that end an answer though the file names only one id. A .gguf has no
# generation_config.json; for Llama 3 and Qwen 2 this gives the ids that theirs list.
END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
)


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _words_split(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(_WORDS.format(digits=digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# tokenizer.ggml.pre to how text is split into words before BPE.
_SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2_split,
    "gpt-2": _gpt2_split,
    "smollm": _smollm_split,
    "llama-bpe": lambda: _words_split(r"\p{N}{1,3}"),
    "qwen2": lambda: _words_split(r"\p{N}"),
}
_PREFERS_WHOLE_WORDS = ("llama-bpe",)  # a word that is in the vocabulary is not merged up
_NFC = ("qwen2",)  # as its tokenizer.json; llama.cpp leaves it out
_BOS_BY_DEFAULT = ("llama-bpe",)


def load_gguf_text(path: Path) -> TextParts:
    """Reads the metadata of one .gguf file.

    The ids that end an answer are the file's EOS, EOT and EOM ids, and every control token whose
    text is in `END_TOKENS`.

    Raises:
        ValueError: naming the file and the key that is missing, wrong or not supported.
    """
    metadata = read_gguf_metadata(path)
    try:
        return _build(path.name, metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _build(name: str, metadata: Mapping[str, GgufValue]) -> TextParts:
    kind = _require(metadata, "tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE) is supported in .gguf"
            " files: serve the model's Hugging Face folder instead"
        )
    pre = _pre_tokenizer_name(metadata)
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = _token_types(metadata, len(tokens))
    tokenizer = _tokenizer(pre, tokens, types, _strings(metadata, "tokenizer.ggml.merges"))
    ids = {
        short: _token_id(metadata, f"tokenizer.ggml.{long}_token_id", len(tokens))
        for short, long in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("eot", "eot"),
            ("eom", "eom"),
            ("unk", "unknown"),
            ("pad", "padding"),
        )
    }
    special = {index for index, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)}
    add_bos = _optional(metadata, "tokenizer.ggml.add_bos_token", bool)
    if add_bos is None:
        add_bos = pre in _BOS_BY_DEFAULT
    if add_bos and ids["bos"] is None:
        raise ValueError("a BOS token is wanted, but tokenizer.ggml.bos_token_id is missing")
    named_ends = [tokens.index(text) for text in END_TOKENS if text in tokens]
    ends = [ids["eos"], ids["eot"], ids["eom"], *(end for end in named_ends if end in special)]
    return TextParts(
        name=name,
        tokenizer=tokenizer,
        special_ids=frozenset(special),
        bos_id=ids["bos"],
        add_bos=add_bos,
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        chat_template=_optional(metadata, "tokenizer.chat_template", str),
        no_template_reason="the .gguf file has no tokenizer.chat_template",
        template_names={
            f"{short}_token": tokens[ids[short]]  # type: ignore[index]  # None is filtered below
            for short in ("bos", "eos", "unk", "pad")
            if ids[short] is not None
        },
    )


def _tokenizer(pre: str, tokens: list[str], types: list[int], merges: list[str]) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ValueError(f"tokenizer.ggml.tokens has {twice!r} twice")
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, gap, right = merge.partition(" ")
        if not (left and gap and right):
            raise ValueError(f"tokenizer.ggml.merges has {merge!r}, which is not a pair")
        pairs.append((left, right))
    try:
        model = models.BPE(
            vocab=vocabulary, merges=pairs, ignore_merges=pre in _PREFERS_WHOLE_WORDS
        )
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"tokenizer.ggml.merges does not fit the tokens: {error}") from error
    tokenizer = Tokenizer(model)
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _SPLITS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    # Added tokens that the vocabulary has already keep their ids.
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)
        ]
    )
    return tokenizer


def _pre_tokenizer_name(metadata: Mapping[str, GgufValue]) -> str:
    pre = _optional(metadata, "tokenizer.ggml.pre", str)
    if pre is None:
        if metadata.get("general.architecture") == "gpt2":
            return "gpt-2"
        raise ValueError("tokenizer.ggml.pre is missing: the file does not say how text is split")
    if pre not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre {pre!r} is not supported; {', '.join(sorted(_SPLITS))} are"
        )
    return pre


def _token_types(metadata: Mapping[str, GgufValue], num_tokens: int) -> list[int]:
    values = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ValueError("tokenizer.ggml.token_type is missing or no list of integers")
    if len(values) != num_tokens:
        raise ValueError(
            f"tokenizer.ggml.token_type has {len(values)} entries for {num_tokens} tokens"
        )
    return [value for value in values if isinstance(value, int)]


def _strings(metadata: Mapping[str, GgufValue], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{key} is missing or no list of strings")
    return [value for value in values if isinstance(value, str)]


def _token_id(metadata: Mapping[str, GgufValue], key: str, num_tokens: int) -> int | None:
    value = _optional(metadata, key, int)
    if value is not None and not 0 <= value < num_tokens:
        raise ValueError(f"{key} is {value}; the file has {num_tokens} tokens")
    return value


def _optional(metadata: Mapping[str, GgufValue], key: str, kind: type[Scalar]) -> Scalar | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{key} is {value!r:.80}, not of type {kind.__name__}")
    return value


def _require(metadata: Mapping[str, GgufValue], key: str, kind: type[Scalar]) -> Scalar:
    value = _optional(metadata, key, kind)
    if value is None:
        raise ValueError(f"{key} is missing")
    return value
