"""WordSplit: how byte-level BPE cuts text into words, by the names that .gguf files give it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Regex, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Callable

# Llama 3's and Qwen 2's differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Mistral Nemo's: a word may change from capitals to small letters once.
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class WordSplit:
    """One entry of the table below; `make` gives a fresh pre-tokenizer."""

    make: Callable[[], pre_tokenizers.PreTokenizer]
    prefers_whole_words: bool = False  # a word that is in the vocabulary is not merged up
    nfc: bool = False  # as its tokenizer.json; llama.cpp leaves it out
    bos_by_default: bool = False


def gpt2_split(*, add_prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
    """GPT-2's: letters, digits and the rest apart, each with the space before it."""
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)


def qwen2_split(*, add_prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
    """Qwen 2's and 3's: each digit alone."""
    return _split(_WORDS.format(digits=r"\p{N}"), add_prefix_space=add_prefix_space)


def _split(*patterns: str, add_prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
    """Each pattern cuts what the ones before it left; what none matches is a word too."""
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
        ]
    )


def _llama3_split() -> pre_tokenizers.PreTokenizer:
    return _split(_WORDS.format(digits=r"\p{N}{1,3}"))


def _smollm_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2_split()])


def _default_split() -> pre_tokenizers.PreTokenizer:
    """llama.cpp's, for files whose writer did not know the model's."""
    return _split(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    )


_LLAMA3 = WordSplit(_llama3_split, prefers_whole_words=True, bos_by_default=True)

# By tokenizer.ggml.pre.
WORD_SPLITS = {
    "default": WordSplit(_default_split),
    "gpt-2": WordSplit(gpt2_split),
    "smollm": WordSplit(_smollm_split),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": WordSplit(qwen2_split, nfc=True),
    "deepseek-r1-qwen": WordSplit(qwen2_split),
    "tekken": WordSplit(lambda: _split(_TEKKEN), prefers_whole_words=True, bos_by_default=True),
}
