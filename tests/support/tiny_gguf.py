"""Tiny GGUF files for tests: random models as llama.cpp's converter would write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    get_tensor_name_map,
)
from gguf.quants import quantize
from tiny_models import BOS, CHAT_TEMPLATE, EOS, byte_alphabet

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PreTrainedModel

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gpt2": MODEL_ARCH.GPT2,
}
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
NORMAL_TOKEN, CONTROL_TOKEN, UNUSED_TOKEN = 1, 3, 5


def architecture(model: PreTrainedModel) -> MODEL_ARCH:
    """What the file will say it is."""
    return ARCHITECTURES[model.config.model_type]


def gguf_name(model: PreTrainedModel, name: str) -> str:
    """blk.N.attn_q.weight for model.layers.N.self_attn.q_proj.weight, …, by gguf's own table."""
    stem, kind = name.rsplit(".", 1)
    names = get_tensor_name_map(architecture(model), model.config.num_hidden_layers)
    found = names.get_name(stem)
    assert found is not None, name
    return f"{found}.{kind}"


def pairs_from_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i and row i + head_dim / 2 of each head become neighbours."""
    head_dim = rows.shape[0] // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    *,
    matrix_type: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    raw_types: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Writes `model`; matrices as `matrix_type`, vectors as F32.

    `metadata` overrides keys (None leaves one out); `tensors` adds, overrides or (None) leaves out
    tensors under GGUF's names; those in `raw_types` are bytes of that type.
    """
    name = MODEL_ARCH_NAMES[architecture(model)]
    writer = GGUFWriter(file, name)
    keys = {f"{name}.{key}": value for key, value in _keys(model).items()} | (metadata or {})
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    _add_tokenizer(writer, model.config.vocab_size)
    contents = gguf_tensors(model) | dict(tensors or {})
    for name, values in contents.items():
        if values is None:
            continue
        if raw_types and name in raw_types:
            writer.add_tensor(name, values, raw_dtype=raw_types[name])
            continue
        kind = matrix_type if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _keys(model: PreTrainedModel) -> dict[str, Any]:
    """What the converter writes, without the architecture's prefix."""
    config = model.config
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
    }
    if config.model_type == "gpt2":
        return keys | {
            "feed_forward_length": config.n_inner or 4 * config.n_embd,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    keys |= {
        "feed_forward_length": config.intermediate_size,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    head_dim = getattr(config, "head_dim", None)  # Qwen2 has none
    if head_dim is not None:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    rope = config.rope_parameters
    if config.model_type == "gemma3_text":
        keys["attention.sliding_window"] = config.sliding_window
        keys["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if config.model_type in ("llama", "mistral"):
        keys["rope.dimension_count"] = head_dim
    keys["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        keys["rope.scaling.type"] = rope["rope_type"]
        keys["rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        length = rope["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = length
        for beta in ("beta_fast", "beta_slow"):
            if beta in rope:
                keys[f"rope.scaling.yarn_{beta}"] = float(rope[beta])
    return keys


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Names and values as the converter makes them."""
    config = model.config
    tensors = {}
    for name, parameter in model.named_parameters():  # names a tied matrix once
        values = parameter.detach().float().numpy()
        if config.model_type in ("llama", "mistral"):
            if ".q_proj." in name:
                values = pairs_from_halves(values, config.num_attention_heads)
            elif ".k_proj." in name:
                values = pairs_from_halves(values, config.num_key_value_heads)
        elif config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            values = values + np.float32(1.0)
        elif config.model_type == "gpt2" and name.endswith(TRANSPOSED):
            values = values.T
        tensors[gguf_name(model, name)] = np.ascontiguousarray(values)
    return tensors


def take_gguf_tensors(model: PreTrainedModel, tensors: Mapping[str, np.ndarray]) -> None:
    """Gives `model` the values of `tensors`, which are like those of `gguf_tensors`."""
    config = model.config
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = tensors[gguf_name(model, name)]
            heads = None
            if config.model_type in ("llama", "mistral") and ".q_proj." in name:
                heads = config.num_attention_heads
            elif config.model_type in ("llama", "mistral") and ".k_proj." in name:
                heads = config.num_key_value_heads
            if heads is not None:
                order = pairs_from_halves(np.arange(values.shape[0]), heads)
                values = values[np.argsort(order)]
            elif config.model_type == "gemma3_text" and name.endswith("norm.weight"):
                values = values - np.float32(1.0)
            elif config.model_type == "gpt2" and name.endswith(TRANSPOSED):
                values = values.T
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(values)))


def _add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    """The byte tokenizer of `tiny_models`; the converter fills the vocabulary up."""
    alphabet = byte_alphabet()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    tokens = [*(alphabet[byte] for byte in range(256)), *special, "ab"]
    unused = [f"[PAD{index}]" for index in range(len(tokens), vocab_size)]
    writer.add_token_list(tokens + unused)
    kinds = [NORMAL_TOKEN] * 256 + [CONTROL_TOKEN] * len(special) + [NORMAL_TOKEN]
    writer.add_token_types(kinds + [UNUSED_TOKEN] * len(unused))
    writer.add_token_merges([f"{alphabet[ord('a')]} {alphabet[ord('b')]}"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(CHAT_TEMPLATE)
