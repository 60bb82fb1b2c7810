"""Models of real shapes with random weights: speed does not depend on the values.

python -m legato.bench.peers.shapes --shape smollm2-135m --out build/peers/smollm2-135m
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """A Llama, named as in config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    tie_word_embeddings: bool


SHAPES = {
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 49152, 8192, 100000.0, tie_word_embeddings=True),
    "tinyllama-1.1b": Shape(2048, 5632, 22, 32, 4, 32000, 2048, 10000.0, tie_word_embeddings=False),
}


def write_model(shape: Shape, folder: Path) -> None:
    """A Hugging Face folder in bfloat16, with a tokenizer of single characters.

    Peers will not load a folder that has no tokenizer; nothing here uses it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = asdict(shape) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_tensors(shape), folder / "model.safetensors", metadata={"format": "pt"})
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(97 + i): 3 + i for i in range(26)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | names)
    )


def _tensors(shape: Shape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, width: int) -> Tensor:
        return torch.empty(rows, width, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    norm = torch.ones(hidden, dtype=torch.bfloat16)
    kv = hidden // shape.num_attention_heads * shape.num_key_value_heads
    tensors = {
        "model.embed_tokens.weight": matrix(shape.vocab_size, hidden),
        "model.norm.weight": norm.clone(),
    }
    if not shape.tie_word_embeddings:
        tensors["lm_head.weight"] = matrix(shape.vocab_size, hidden)
    for index in range(shape.num_hidden_layers):
        prefix = f"model.layers.{index}."
        tensors |= {
            prefix + "input_layernorm.weight": norm.clone(),
            prefix + "self_attn.q_proj.weight": matrix(hidden, hidden),
            prefix + "self_attn.k_proj.weight": matrix(kv, hidden),
            prefix + "self_attn.v_proj.weight": matrix(kv, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, hidden),
            prefix + "post_attention_layernorm.weight": norm.clone(),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    return tensors


def main() -> None:
    """Writes one model."""
    parser = argparse.ArgumentParser(
        prog="python -m legato.bench.peers.shapes", description=__doc__
    )
    parser.add_argument("--shape", required=True, choices=sorted(SHAPES))
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    write_model(SHAPES[args.shape], args.out)


if __name__ == "__main__":
    main()
