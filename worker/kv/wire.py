"""WireFormat: what rows of KV are sent as, and how many bytes they are then.

The layout is `kernels.kv_rows`'s: [num_layers, 2 (K, V), num_tokens, num_heads, head_dim], and the
scales behind it where an element has 8 bits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.kernels.kv_rows import rows_bytes

if TYPE_CHECKING:
    from legato.worker.kv.cache import KvShape
    from legato.worker.kv.row_range import RowRange

if sys.byteorder != "little":
    raise ImportError("the KV wire layout is little-endian; this machine is not")

# What `WorkerConfig.kv_wire` may name besides "same", the dtype of the pages.
KV_WIRE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class WireFormat:
    """Rows are converted on the way from the pages and on the way into them, by `kernels.kv_rows`.
    Those whose dtype is the pages' arrive bit for bit, with the scales that they had.
    """

    name: str  # as configured: both sides of a hand-off must have the same
    dtype: torch.dtype  # of an element on the wire
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, shape: KvShape, kv_wire: str) -> WireFormat:
        """Raises ValueError: there is no such wire."""
        if kv_wire != "same" and kv_wire not in KV_WIRE_DTYPES:
            names = ", ".join(("same", *KV_WIRE_DTYPES))
            raise ValueError(f"kv_wire must be one of {names}, got {kv_wire!r}")
        return cls(
            name=kv_wire,
            dtype=shape.dtype if kv_wire == "same" else KV_WIRE_DTYPES[kv_wire],
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )

    def num_bytes(self, rows: RowRange) -> int:
        """Of those rows, scales included.

        Raises:
            ValueError: the range has no rows, or layers or KV heads that the model has not.
        """
        for name, start, count, limit in (
            ("layers", rows.layer_start, rows.num_layers, self.num_layers),
            ("KV heads", rows.head_start, rows.num_heads, self.num_kv_heads),
        ):
            if start < 0 or count < 1 or start + count > limit:
                raise ValueError(f"{name} {start} to {start + count} are not within [0, {limit})")
        if rows.token_start < 0 or rows.num_tokens < 1:
            raise ValueError(f"tokens {rows.token_start} to {rows.token_end} are no rows")
        return rows_bytes(rows, self.head_dim, self.dtype)
