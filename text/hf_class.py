"""TokenizerClass: what the class that a folder names sets over its tokenizer.json.

transformers 5 takes vocabulary and merges from the file, and everything else from these classes.
Other classes take tokenizer.json as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import decoders, models, normalizers, pre_tokenizers

from legato.text.sentencepiece_bpe import SPACE
from legato.text.word_split import gpt2_split, qwen2_split

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tokenizers import Tokenizer

# By config.json's model_type; None stands for tokenizer.json as it is. "llama" is not registered.
_BY_MODEL_TYPE: dict[str, str | None] = {
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "mistral": None,
    "mistral3": None,
    "ministral": None,
    "qwen2": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
}
# For these the class that the folder names is known to be wrong at times, and not believed.
_DISBELIEVED = frozenset({"qwen2"})

# Names of special tokens that a class has where the folder does not say (not even null).
_NAMES: dict[str, dict[str, str]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
}


def tokenizer_class(
    config: Mapping[str, Any], model_config: Mapping[str, Any], *, byte_level: bool
) -> str | None:
    """The class that counts; None where tokenizer.json does. As transformers 5's AutoTokenizer.

    `config` is tokenizer_config.json, `model_config` config.json; `byte_level`: tokenizer.json
    has a ByteLevel part, which a LlamaTokenizer cannot have.
    """
    named = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    named = named.removesuffix("Fast") if isinstance(named, str) else None
    model_type = model_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _BY_MODEL_TYPE:
        chosen = None if named == "LlamaTokenizer" and byte_level else named
    else:
        registered = _BY_MODEL_TYPE[model_type]
        disbelieved = model_type in _DISBELIEVED
        if named is None or registered is None or disbelieved:
            chosen = registered
        else:
            chosen = None if named == "LlamaTokenizer" and byte_level else named
    return chosen if chosen in _NAMES else None


def class_names(chosen: str | None) -> Mapping[str, str]:
    """The special tokens that the class names by default."""
    return _NAMES[chosen] if chosen is not None else {}


def apply_class(
    chosen: str | None,
    tokenizer: Tokenizer,
    config: Mapping[str, Any],
    names: Mapping[str, str],
) -> None:
    """Sets the class's parts; call it before anything is encoded.

    Raises:
        ValueError: the class cannot have this tokenizer.json.
    """
    if chosen is None:
        return
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        raise ValueError(
            f"tokenizer_class is {chosen}, which has a BPE model; tokenizer.json has a"
            f" {type(model).__name__} model"
        )
    model.dropout = None
    model.ignore_merges = False
    _APPLY[chosen](tokenizer, model, config, names)


def _llama(
    tokenizer: Tokenizer, model: models.BPE, config: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    model.unk_token = None
    model.fuse_unk = True
    model.byte_fallback = True
    tokenizer.normalizer = None
    prefix = _flag(config, "add_prefix_space", default=True)
    # Without `legacy`, text behind a control token gets no space.
    scheme = "always" if _flag(config, "legacy", default=False) else "first"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme=scheme if prefix else "never", split=False
    )
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([*_visible_spaces(), *strip])


def _gemma(
    tokenizer: Tokenizer, model: models.BPE, config: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    model.unk_token = names.get("unk_token")
    model.fuse_unk = True
    model.byte_fallback = True
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(_visible_spaces())


def _qwen2(
    tokenizer: Tokenizer, model: models.BPE, config: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    _plain_bpe(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = qwen2_split(
        add_prefix_space=_flag(config, "add_prefix_space", default=False)
    )
    tokenizer.decoder = decoders.ByteLevel()


def _gpt2(
    tokenizer: Tokenizer, model: models.BPE, config: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    _plain_bpe(model)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = gpt2_split(
        add_prefix_space=_flag(config, "add_prefix_space", default=False)
    )
    tokenizer.decoder = decoders.ByteLevel()


_APPLY: dict[str, Callable[[Tokenizer, models.BPE, Mapping[str, Any], Mapping[str, str]], None]] = {
    "LlamaTokenizer": _llama,
    "GemmaTokenizer": _gemma,
    "Qwen2Tokenizer": _qwen2,
    "GPT2Tokenizer": _gpt2,
}


def _plain_bpe(model: models.BPE) -> None:
    model.unk_token = None
    model.fuse_unk = False
    model.byte_fallback = False


def _visible_spaces() -> list[decoders.Decoder]:
    return [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


def _flag(config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = config.get(key, default)
    return default if value is None and default else bool(value)
