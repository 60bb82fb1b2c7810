"""gguf_config: the metadata of a GGUF file of architecture "llama" as a ModelConfig."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from legato.worker.models.config import ModelConfig, RopeConfig
from legato.worker.models.config_fields import ConfigFields
from legato.worker.weights.checkpoint import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

# Settings of arch "llama" that change the computation and that this engine does not know.
# Absent or 0 means off; anything else is refused.
_UNSUPPORTED = (
    "expert_count",
    "expert_used_count",
    "attention.sliding_window",
    "attention.scale",
    "attention.temperature_scale",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
)
# What the converter writes into rope_freqs.weight depends on these two, which it does not
# write; they are the same in every Llama 3.1, 3.2 and 3.3.
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_CONTEXT_LENGTH = 8192


def gguf_model_config(
    metadata: Mapping[str, object],
    *,
    tensor_names: Collection[str],
    vocab_size: int,
    rope_freqs: Sequence[float] | None,
    where: str,
) -> ModelConfig:
    """The model that the metadata and the names of the tensors describe.

    `vocab_size` is the number of rows of the embedding; `rope_freqs` the contents of
    rope_freqs.weight, where there is one; `where` names the file in errors.

    Raises:
        CheckpointError: something is missing, malformed or not served by this engine.
    """
    architecture = ConfigFields(metadata, where, "general.").text("architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"{where}: general.architecture is {architecture!r}; only llama is supported"
        )
    fields = ConfigFields(metadata, where, "llama.")
    for name in _UNSUPPORTED:
        value = fields.get(name)
        if value not in (None, 0):
            raise fields.error(name, f"is {value!r}, which is not supported")
    if not fields.boolean("attention.causal", default=True):
        raise fields.error("attention.causal", "is false; only causal models are supported")

    num_heads = fields.integer("attention.head_count")
    head_dim = _head_dim(fields, num_heads)
    context_length = fields.integer("context_length")
    try:
        return ModelConfig(
            architecture="llama",
            num_layers=fields.integer("block_count"),
            hidden_size=fields.integer("embedding_length"),
            intermediate_size=fields.integer("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            vocab_size=vocab_size,
            context_length=context_length,
            norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="output.weight" not in tensor_names,
            attention_bias="blk.0.attn_q.bias" in tensor_names,
            attention_out_bias="blk.0.attn_output.bias" in tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
            rope=_rope(fields, head_dim, rope_freqs),
        )
    except CheckpointError:
        raise
    except ValueError as error:  # ModelConfig's own checks do not know the file
        raise CheckpointError(f"{where}: {error}") from error


def _head_dim(fields: ConfigFields, num_heads: int) -> int:
    hidden_size = fields.integer("embedding_length")
    if num_heads < 1:
        raise fields.error("attention.head_count", f"must be at least 1, got {num_heads}")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        value = fields.integer(name, head_dim)
        if value != head_dim:
            raise fields.error(name, f"is {value}; it must equal the length of a head, {head_dim}")
    return head_dim


def _rope(fields: ConfigFields, head_dim: int, rope_freqs: Sequence[float] | None) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    # An early name of linear scaling, before there was a type.
    old_factor = fields.number("rope.scale_linear", 1.0)
    kind = fields.text("rope.scaling.type", "none" if old_factor == 1.0 else "linear")
    if kind not in ("none", "linear"):
        raise fields.error("rope.scaling.type", f"is {kind!r}; supported are none and linear")
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier"):
        if fields.number(name, 1.0) != 1.0:
            raise fields.error(name, "must be 1, other values are not supported")
    factor = fields.number("rope.scaling.factor", old_factor)
    if kind == "none":
        if factor != 1.0:
            raise fields.error("rope.scaling.factor", f"is {factor} without rope.scaling.type")
        if rope_freqs is None:
            return RopeConfig(theta=theta)
        if len(rope_freqs) != head_dim // 2:
            raise CheckpointError(
                f"{fields.where}: tensor rope_freqs.weight has {len(rope_freqs)} numbers, a head "
                f"of {head_dim} needs {head_dim // 2}"
            )
        if max(rope_freqs, default=1.0) == 1.0:
            return RopeConfig(theta=theta)
        return _llama3(fields, theta, head_dim, rope_freqs)
    if rope_freqs is not None:
        raise fields.error("rope.scaling.type", "is linear beside a tensor rope_freqs.weight")
    return RopeConfig(theta=theta, kind="linear", factor=factor)


def _llama3(
    fields: ConfigFields, theta: float, head_dim: int, rope_freqs: Sequence[float]
) -> RopeConfig:
    """Finds the llama3 settings that rope_freqs.weight was made from."""
    rope = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=max(rope_freqs),
        low_freq_factor=LLAMA3_LOW_FREQ_FACTOR,
        high_freq_factor=LLAMA3_HIGH_FREQ_FACTOR,
        original_context_length=fields.integer(
            "rope.scaling.original_context_length", LLAMA3_ORIGINAL_CONTEXT_LENGTH
        ),
    )
    expected = llama3_divisors(rope, head_dim)
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, rope_freqs, strict=True)):
        raise CheckpointError(
            f"{fields.where}: tensor rope_freqs.weight does not follow the llama3 rule with "
            f"factor {rope.factor:g} and original length {rope.original_context_length}, the only "
            "one supported"
        )
    return rope


def llama3_divisors(rope: RopeConfig, head_dim: int) -> list[float]:
    """What llama3 scaling divides each of the head_dim / 2 RoPE frequencies by.

    Long waves are stretched by `factor`, short ones not at all; between the two limits the
    frequency is interpolated (Llama 3.1's rule).
    """
    low, high = rope.low_freq_factor, rope.high_freq_factor
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope.theta ** (2 * pair / head_dim)
        turns = rope.original_context_length / wavelength
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - kept) / rope.factor + kept))
    return divisors
