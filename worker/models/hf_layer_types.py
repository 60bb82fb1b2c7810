"""hf_layer_types: which layers see a window only, as config.json's layer_types says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.models.config import MAX_LAYERS
from legato.worker.weights.quoting import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.worker.models.config_fields import ConfigFields

KINDS = ("full_attention", "sliding_attention")


def read_num_layers(fields: ConfigFields) -> int:
    """num_hidden_layers, within bounds: what follows is made for each layer."""
    num_layers = fields.integer("num_hidden_layers")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise fields.error("num_hidden_layers", f"must be from 1 to {MAX_LAYERS}, got {num_layers}")
    return num_layers


def read_layer_types(fields: ConfigFields, num_layers: int) -> list[str] | None:
    """One of KINDS for each layer; None where the field is absent or null."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list):
        raise fields.error("layer_types", f"must be a list, got {quoted(kinds)}")
    for kind in kinds:
        if kind not in KINDS:
            raise fields.error(
                "layer_types", f"has {quoted(kind)}; supported are {', '.join(KINDS)}"
            )
    if len(kinds) != num_layers:
        raise fields.error(
            "layer_types", f"has {len(kinds)} entries for num_hidden_layers {num_layers}"
        )
    return kinds


def windows(kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """`ModelConfig.layer_windows`: empty where no layer has a window."""
    if "sliding_attention" not in kinds:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
