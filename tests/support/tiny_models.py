"""Tiny models on disk for tests: random Llamas in Hugging Face folders, with a byte tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

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


def make_llama(*, seed: int = 0, **overrides: Any) -> LlamaForCausalLM:  # noqa: ANN401  # passed on to LlamaConfig
    """A random Llama in fp32 whose every position matters (std 0.2, not the usual 0.02)."""
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
        "initializer_range": 0.2,
    }
    settings.update(overrides)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings)).float().eval()
    with torch.no_grad():  # fresh models have norm weights of 1 and biases of 0: blind spots
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model


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
