"""Gptq: matrices as AutoGPTQ and GPTQModel store them.

For each layer, with f = 32 / bits values in an int32, the lowest bits first:
`qweight` [K / f, N] (packed along K), `qzeros` [G, N / f] (packed along N), `scales` [G, N], and
`g_idx` [K], the group of each input. w = scale * (q - zero). Format "gptq" stores zero - 1,
"gptq_v2" zero itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.kernels.weight import QuantizedWeight
from legato.worker.weights.quoting import quoted
from legato.worker.weights.stored_matrix import (
    SCALE_DTYPES,
    Codes,
    check_width,
    nibbles,
    packed_words,
)

if TYPE_CHECKING:
    from legato.worker.models.config_fields import ConfigFields
    from legato.worker.weights.stored_matrix import Parts

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
# What format "gptq" adds to a stored zero point; it wraps, as all its readers do.
_ZERO_STEP = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True)
class Gptq:
    """See `Layout`."""

    bits: int
    group_size: int | None  # None: one group a row
    zero_step: int
    act_order: bool = False  # groups may be of any inputs: g_idx must say which

    @classmethod
    def from_config(cls, fields: ConfigFields) -> Gptq:
        """Reads a quantization_config (or AutoGPTQ's old quantize_config.json).

        Raises:
            CheckpointError: a setting that is not served.
        """
        bits = fields.integer("bits")
        if bits not in (4, 8):
            raise fields.error("bits", f"is {bits}; supported are 4 and 8")
        group_size = fields.integer("group_size", -1)
        if group_size != -1 and (group_size < 8 or group_size % 8):
            raise fields.error("group_size", f"is {group_size}; must be -1 or a multiple of 8")
        name = "checkpoint_format"
        if fields.get(name) is None and fields.get("format") is not None:
            name = "format"  # GPTQModel's spelling
        form = fields.text(name, "gptq")
        if form not in _ZERO_STEP:
            raise fields.error(name, f"is {quoted(form)}; supported are {', '.join(_ZERO_STEP)}")
        if fields.boolean("is_marlin_format", default=False):
            raise fields.error("is_marlin_format", "is true; supported is the plain GPTQ layout")
        if fields.get("dynamic"):
            raise fields.error("dynamic", "gives layers settings of their own: not supported")
        if fields.text("pack_dtype", "int32").removeprefix("torch.") != "int32":
            raise fields.error(
                "pack_dtype", f"is {quoted(fields.text('pack_dtype'))}; must be int32"
            )
        return cls(
            bits,
            None if group_size == -1 else group_size,
            _ZERO_STEP[form],
            fields.boolean("desc_act", default=False),
        )

    def shape(self, parts: Parts) -> tuple[int, int]:
        """See `Layout`."""
        per_word = 32 // self.bits
        words, rows = parts.stored("qweight", ("I32",)).shape
        width = words * per_word
        check_width(parts.stem, str(parts.tensors["qweight"].file), width)
        groups = -(-width // (self.group_size or width))
        parts.require("scales", SCALE_DTYPES, (groups, rows))
        if rows % per_word:
            raise parts.error("qweight", f"has {rows} outputs, no multiple of {per_word}")
        parts.require("qzeros", ("I32",), (groups, rows // per_word))
        if "g_idx" in parts or (self.act_order and groups > 1):
            parts.require("g_idx", ("I32", "I64"), (width,))
        return rows, width

    def read(self, parts: Parts) -> Codes:
        """See `Layout`."""
        rows, width = self.shape(parts)
        group_size = self.group_size or width
        # A word of qweight holds neighbouring inputs of one output: transposed, its bytes are
        # already those of a QuantizedWeight.
        values = packed_words(parts.read("qweight").t())
        zeros = packed_words(parts.read("qzeros"))
        if self.bits == 4:
            zeros = nibbles(zeros)
        zeros = (zeros + self.zero_step) & (2**self.bits - 1)
        scales = parts.scales("scales")
        weight = QuantizedWeight(
            self.bits,
            width,
            group_size,
            values,
            scales.t().contiguous(),
            (-scales * zeros.float()).t().contiguous(),
        )
        assert weight.out_features == rows
        groups = None
        if "g_idx" in parts:
            groups = parts.groups("g_idx", width, group_size, scales.shape[0])
        return Codes(weight, groups)
