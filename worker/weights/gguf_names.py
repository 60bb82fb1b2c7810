"""gguf_names: what GGUF calls the tensors of each architecture, and what it changes in them.

The converter from Hugging Face's folders does three things to values, which are undone here:
Llama's Q and K have their rows interleaved, Gemma's norms have the 1 added that Gemma's own files
leave out, and GPT-2's matrices are turned from [in, out] to [out, in].
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from legato.worker.models.config import ModelConfig

_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class GgufNames:
    """One architecture's. The names of the tables are without ".weight" and ".bias"."""

    outer: Mapping[str, str]
    layers: str  # what Hugging Face's names of a layer's tensors begin with
    in_layer: Mapping[str, str]
    interleaves_heads: bool = False  # rows of Q and K
    adds_to_norms: float = 0.0
    transposes: tuple[str, ...] = ()  # endings of Hugging Face's names

    def hugging_face_name(self, name: str) -> str | None:
        """What Hugging Face calls GGUF's tensor; None where this architecture has none such."""
        stem, _, kind = name.rpartition(".")
        if stem in self.outer and kind in ("weight", "bias"):
            return f"{self.outer[stem]}.{kind}"
        match = _LAYER_NAME.fullmatch(name)
        if match is None or match[2] not in self.in_layer:
            return None
        return f"{self.layers}.{match[1]}.{self.in_layer[match[2]]}.{match[3]}"

    def shape(self, name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        """That of Hugging Face's tensor `name`, of which the file has one of shape `stored`."""
        return stored[::-1] if self.is_transposed(name) else stored

    def is_transposed(self, name: str) -> bool:
        """Whether the file has Hugging Face's tensor `name` with rows for columns."""
        return name.endswith(self.transposes)

    def num_interleaved_heads(self, name: str, config: ModelConfig) -> int | None:
        """Heads of a tensor whose rows the file has in another order; None for all others."""
        if not self.interleaves_heads:
            return None
        if ".q_proj." in name:
            return config.num_heads
        return config.num_kv_heads if ".k_proj." in name else None

    def restored(self, name: str, values: Tensor, config: ModelConfig) -> Tensor:
        """The values of Hugging Face's tensor `name`, out of those in the file."""
        num_heads = self.num_interleaved_heads(name, config)
        if num_heads is not None:
            return halves_from_pairs(values, num_heads)
        if self.is_transposed(name):
            return values.t()
        if self.adds_to_norms and name.endswith("norm.weight"):
            return values.float() - self.adds_to_norms
        return values


def halves_from_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Undoes GGUF's row order of Q and K: [num_heads * head_dim, ...] in and out.

    GGML rotates neighbouring rows (0, 1), (2, 3), …; Hugging Face rotates row i of a head with
    row i + head_dim / 2. So a Llama's file interleaves the two halves of every head. For the other
    architectures GGML has Hugging Face's rotation too.
    """
    head_dim = rows.shape[0] // num_heads
    pairs = rows.reshape(num_heads, head_dim // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)


_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_DECODER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TWO_NORMS = _DECODER | {"ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = _DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF_NAMES = {
    "llama": GgufNames(_OUTER, "model.layers", _TWO_NORMS, interleaves_heads=True),
    "qwen2": GgufNames(_OUTER, "model.layers", _TWO_NORMS),
    "qwen3": GgufNames(_OUTER, "model.layers", _TWO_NORMS | _QK_NORMS),
    "gemma3": GgufNames(_OUTER, "model.layers", _FOUR_NORMS | _QK_NORMS, adds_to_norms=1.0),
    "gpt2": GgufNames(
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        "transformer.h",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        transposes=("attn.c_attn.weight", ".c_proj.weight", "mlp.c_fc.weight"),
    ),
}
