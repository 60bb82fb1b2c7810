"""Awq: matrices as AutoAWQ stores them (its GEMM layout).

For each layer: `qweight` [K, N / 8] and `qzeros` [G, N / 8], both packed along N, eight values of
four bits in an int32; `scales` [G, N]. The lowest four bits hold output 0 of the eight, the next
ones 2, 4, 6, 1, 3, 5 and 7. w = scale * (q - zero).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.kernels.weight import QuantizedWeight
from legato.worker.weights.quoting import quoted
from legato.worker.weights.stored_matrix import (
    SCALE_DTYPES,
    Codes,
    check_width,
    nibbles,
    pack_nibbles,
    packed_words,
)

if TYPE_CHECKING:
    from torch import Tensor

    from legato.worker.models.config_fields import ConfigFields
    from legato.worker.weights.stored_matrix import Parts

SUFFIXES = ("qweight", "qzeros", "scales")
_OUTPUT_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
_NIBBLE_OF_OUTPUT = [_OUTPUT_OF_NIBBLE.index(output) for output in range(8)]


@dataclass(frozen=True)
class Awq:
    """See `Layout`."""

    group_size: int | None  # None: one group a row

    @classmethod
    def from_config(cls, fields: ConfigFields) -> Awq:
        """Reads a quantization_config (or AutoAWQ's old quant_config.json).

        Raises:
            CheckpointError: a setting that is not served.
        """
        bits_name = "w_bit" if fields.get("bits") is None else "bits"
        bits = fields.integer(bits_name, 4)
        if bits != 4:
            raise fields.error(bits_name, f"is {bits}; supported is 4")
        name = "q_group_size" if fields.get("group_size") is None else "group_size"
        group_size = fields.integer(name, 128)
        if group_size != -1 and (group_size < 8 or group_size % 8):
            raise fields.error(name, f"is {group_size}; must be -1 or a multiple of 8")
        version = fields.text("version", "gemm")
        if version.lower() != "gemm":
            raise fields.error("version", f"is {quoted(version)}; supported is gemm")
        if fields.text("backend", "autoawq") != "autoawq":
            raise fields.error(
                "backend", f"is {quoted(fields.text('backend'))}; supported is autoawq"
            )
        if not fields.boolean("zero_point", default=True):
            raise fields.error("zero_point", "is false; supported is true")
        return cls(None if group_size == -1 else group_size)

    def shape(self, parts: Parts) -> tuple[int, int]:
        """See `Layout`."""
        width, words = parts.stored("qweight", ("I32",)).shape
        check_width(parts.stem, str(parts.tensors["qweight"].file), width)
        groups = -(-width // (self.group_size or width))
        parts.require("scales", SCALE_DTYPES, (groups, words * 8))
        parts.require("qzeros", ("I32",), (groups, words))
        return words * 8, width

    def read(self, parts: Parts) -> Codes:
        """See `Layout`."""
        rows, width = self.shape(parts)
        values = pack_nibbles(_in_order(parts.read("qweight")).t().contiguous())
        zeros = _in_order(parts.read("qzeros"))
        scales = parts.scales("scales")
        weight = QuantizedWeight(
            4,
            width,
            self.group_size or width,
            values,
            scales.t().contiguous(),
            (-scales * zeros.float()).t().contiguous(),
        )
        assert weight.out_features == rows
        return Codes(weight)


def _in_order(words: Tensor) -> Tensor:
    """int32 [R, N / 8] to uint8 [R, N]."""
    halves = nibbles(packed_words(words)).view(words.shape[0], -1, 8)
    return halves[:, :, torch.tensor(_NIBBLE_OF_OUTPUT)].flatten(1)
