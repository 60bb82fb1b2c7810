"""Tiny random models of every family for tests, in memory or in folders with a byte tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

if TYPE_CHECKING:
    from pathlib import Path

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
VOCAB_SIZE = 320  # larger than the tokenizer's 260, as many real models have it
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    for shift, byte in enumerate(b for b in range(256) if b not in table):
        table[byte] = chr(256 + shift)
    return table


def write_byte_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Ids 0 to 255 are raw bytes; 256 to 259 are <s>, </s>, <|im_start|>, <|im_end|>."""
    vocab = {char: byte for byte, char in byte_alphabet().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "gpt2": (GPT2Config, GPT2LMHeadModel),
}
# What shows a family's own features: windows shorter than the prompts, a head_dim of its own.
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen2": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": {"head_dim": 32},
    "gemma3": {
        "head_dim": 32,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 48,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        "tie_word_embeddings": True,
    },
    "gpt2": {"tie_word_embeddings": True},
}
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def make_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:  # noqa: ANN401  # passed on to the config
    """A random model in fp32 whose every position matters (std 0.2, not the usual 0.02)."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": None,
        "initializer_range": 0.2,
    }
    settings |= _OF_FAMILY[family] | overrides
    if family == "gpt2":
        settings.pop("num_key_value_heads")
        settings = {_GPT2_NAMES.get(name, name): value for name, value in settings.items()}
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**settings)).float().eval()
    _randomise(model, norm_weight=0.0 if family == "gemma3" else 1.0)
    return model


def _randomise(model: PreTrainedModel, *, norm_weight: float) -> None:
    """Fresh models have norm weights of 1 (Gemma: 0) and biases of 0: blind spots."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif "norm" in name or ".ln_" in name:
                parameter.uniform_(norm_weight - 0.5, norm_weight + 0.5)


def make_llama(*, seed: int = 0, **overrides: Any) -> LlamaForCausalLM:  # noqa: ANN401  # passed on to LlamaConfig
    """`make_model` of a Llama."""
    model = make_model("llama", seed=seed, **overrides)
    assert isinstance(model, LlamaForCausalLM)
    return model


def make_model_folder(folder: Path, family: str, **overrides: Any) -> Path:  # noqa: ANN401  # passed on to the config
    """Writes `make_model`'s model with its tokenizer; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(family, **overrides).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def make_llama_folder(
    folder: Path,
    *,
    seed: int = 0,
    max_shard_size: str = "5GB",
    chat_template: str | None = CHAT_TEMPLATE,
    **overrides: Any,  # noqa: ANN401  # passed on to LlamaConfig
) -> Path:
    """Writes `make_llama`'s model with its tokenizer; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    make_llama(seed=seed, **overrides).save_pretrained(folder, max_shard_size=max_shard_size)
    write_byte_tokenizer(folder, chat_template=chat_template)
    return folder
