"""GGUF text: the tokenizer, special tokens and chat template in a .gguf file's metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from legato.protos.printable import shown
from legato.text.gguf_metadata import read_gguf_metadata
from legato.text.library_errors import library_errors
from legato.text.sentencepiece_bpe import CONTROL, UNKNOWN, USER_DEFINED, sentencepiece_bpe
from legato.text.text_parts import TextParts
from legato.text.word_split import WORD_SPLITS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from legato.text.gguf_metadata import GgufValue

Scalar = TypeVar("Scalar", str, int, bool)

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
    "<eos>",
)
# What SentencePiece would do to text before it merges, and we do not.
_UNSUPPORTED = ("remove_extra_whitespaces", "precompiled_charsmap")


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
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = _token_types(metadata, len(tokens))
    kind = _require(metadata, "tokenizer.ggml.model", str)
    if kind == "gpt2":
        pre = _pre_tokenizer_name(metadata)
        tokenizer = _byte_level(pre, tokens, types, _strings(metadata, "tokenizer.ggml.merges"))
        bos_by_default = WORD_SPLITS[pre].bos_by_default
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types)
        bos_by_default = True
    else:
        raise ValueError(
            f"tokenizer.ggml.model is {shown(kind)}; 'gpt2' (byte-level BPE) and 'llama'"
            " (SentencePiece's BPE) are supported in .gguf files: serve the model's Hugging Face"
            " folder instead"
        )
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
    special = {index for index, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)}
    add_bos = _optional(metadata, "tokenizer.ggml.add_bos_token", bool)
    if add_bos is None:
        add_bos = bos_by_default
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


def _sentencepiece(
    metadata: Mapping[str, GgufValue], tokens: list[str], types: list[int]
) -> Tokenizer:
    values = metadata.get("tokenizer.ggml.scores")
    if not isinstance(values, list) or not all(isinstance(value, (int, float)) for value in values):
        raise ValueError("tokenizer.ggml.scores is missing or no list of numbers")
    scores = [float(value) for value in values if isinstance(value, (int, float))]
    if len(scores) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    for key in _UNSUPPORTED:
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise ValueError(f"tokenizer.ggml.{key} is set, which is not supported")
    prefix = _optional(metadata, "tokenizer.ggml.add_space_prefix", bool)
    return sentencepiece_bpe(
        tokens, scores, types, add_space_prefix=True if prefix is None else prefix
    )


def _byte_level(pre: str, tokens: list[str], types: list[int], merges: list[str]) -> Tokenizer:
    split = WORD_SPLITS[pre]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ValueError(f"tokenizer.ggml.tokens has {shown(twice)} twice")
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, gap, right = merge.partition(" ")
        if not (left and gap and right):
            raise ValueError(f"tokenizer.ggml.merges has {shown(merge)}, which is not a pair")
        pairs.append((left, right))
    with library_errors("tokenizer.ggml.merges does not fit the tokens"):
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=split.prefers_whole_words)
    tokenizer = Tokenizer(model)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split.make()
    tokenizer.decoder = decoders.ByteLevel()
    # Added tokens that the vocabulary has already keep their ids.
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ]
    )
    return tokenizer


def _pre_tokenizer_name(metadata: Mapping[str, GgufValue]) -> str:
    pre = _optional(metadata, "tokenizer.ggml.pre", str)
    if pre is None:
        if metadata.get("general.architecture") == "gpt2":
            return "gpt-2"
        raise ValueError("tokenizer.ggml.pre is missing: the file does not say how text is split")
    if pre not in WORD_SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre {shown(pre)} is not supported;"
            f" {', '.join(sorted(WORD_SPLITS))} are"
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
        raise ValueError(f"{key} is {shown(value)}, not of type {kind.__name__}")
    return value


def _require(metadata: Mapping[str, GgufValue], key: str, kind: type[Scalar]) -> Scalar:
    value = _optional(metadata, key, kind)
    if value is None:
        raise ValueError(f"{key} is missing")
    return value
