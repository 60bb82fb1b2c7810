"""gguf_sizes: the sizes in a GGUF file's metadata, whose keys are alike for all architectures."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from legato.worker.models.config import MAX_LAYERS

if TYPE_CHECKING:
    from legato.worker.models.config_fields import ConfigFields


class GgufSizes(TypedDict):
    """The keys are ModelConfig's."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int


def read_gguf_sizes(fields: ConfigFields) -> GgufSizes:
    """Reads them from the architecture's `fields`.

    Raises:
        CheckpointError: one is missing or malformed, or heads are of several lengths.
    """
    num_layers = fields.integer("block_count")
    if not 1 <= num_layers <= MAX_LAYERS:  # settings of each layer are made in full
        raise fields.error("block_count", f"must be from 1 to {MAX_LAYERS}, got {num_layers}")
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    return GgufSizes(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=_head_dim(fields, hidden_size, num_heads),
        context_length=fields.integer("context_length"),
    )


def _head_dim(fields: ConfigFields, hidden_size: int, num_heads: int) -> int:
    if num_heads < 1:
        raise fields.error("attention.head_count", f"must be at least 1, got {num_heads}")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        value = fields.integer(name, head_dim)
        if value != head_dim:
            raise fields.error(name, f"is {value}; it must equal the length of a head, {head_dim}")
    return head_dim
