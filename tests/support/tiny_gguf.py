"""Tiny GGUF files for tests: a random Llama as llama.cpp's converter would write it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tiny_models import BOS, CHAT_TEMPLATE, EOS, byte_alphabet

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import LlamaForCausalLM

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMAL_TOKEN, CONTROL_TOKEN = 1, 3


def gguf_name(name: str) -> str:
    """blk.N.attn_q.weight for model.layers.N.self_attn.q_proj.weight, and so on."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


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
    model: LlamaForCausalLM,
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
    config = model.config
    writer = GGUFWriter(file, "llama")
    keys: dict[str, Any] = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "llama.rope.dimension_count": config.head_dim,
        **(metadata or {}),
    }
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
    _add_tokenizer(writer)
    contents = _gguf_tensors(model) | dict(tensors or {})
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


def _gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    config = model.config
    tensors = {}
    for name, parameter in model.named_parameters():  # names a tied matrix once
        values = parameter.detach().float().numpy()
        if ".q_proj." in name:
            values = pairs_from_halves(values, config.num_attention_heads)
        elif ".k_proj." in name:
            values = pairs_from_halves(values, config.num_key_value_heads)
        tensors[gguf_name(name)] = np.ascontiguousarray(values)
    return tensors


def _add_tokenizer(writer: GGUFWriter) -> None:
    """The byte tokenizer of `tiny_models`."""
    alphabet = byte_alphabet()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(alphabet[byte] for byte in range(256)), *special])
    writer.add_token_types([NORMAL_TOKEN] * 256 + [CONTROL_TOKEN] * len(special))
    writer.add_token_merges([f"{alphabet[ord('a')]} {alphabet[ord('b')]}"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(CHAT_TEMPLATE)
