"""rows: rows of a table by index: token embeddings, and the rows whose logits are wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels import native
from legato.kernels.layout import require_contiguous, require_dtype, require_shape
from legato.kernels.weight import PackedWeight, QuantizedWeight, Weight

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_KIND_CODES = {"f32": 0, "bf16": 1, "f16": 2, "q8": 3, "q4": 4}


def take_rows(
    table: Weight, indices: Tensor, out: Tensor, *, scale: float = 1.0, add: bool = False
) -> Tensor:
    """out = table[indices] * scale, or `out +=` that; in fp32, rounded once.

    Args:
        table: [V, N]; any form of a weight, converted to out's dtype.
        indices: [T] int64, each in [0, V): the caller's to check.
        out: [T, N].
        scale: of every element (Gemma's embeddings).
        add: adds to `out` instead of overwriting it (learned positions).
    """
    width = table.shape[1] if isinstance(table, Tensor) else table.in_features
    require_shape(out, (indices.shape[0], width), "out")
    require_dtype(indices, torch.int64, "indices")
    require_contiguous(out=out, indices=indices)
    if out.is_cuda and not isinstance(table, PackedWeight):
        from legato.kernels import rows_triton

        return rows_triton.take_rows(table, indices, out, scale=scale, add=add)
    if native.takes(out) and isinstance(table, Tensor):
        require_contiguous(table=table)
        sizes = (indices.shape[0], width, _DTYPE_CODES[table.dtype], int(add))
        native.launch(
            "lg_take_rows", (table, indices, out), sizes, (scale,), num_tasks=out.shape[0]
        )
        return out
    if isinstance(table, PackedWeight):
        if table.gated:
            raise ValueError("no rows are taken of a weight packed with gated=True")
        if not native.takes(out):
            raise ValueError(f"with a packed weight, out must be fp32 on the CPU, got {out.dtype}")
        groups = (table.group_size, *table.group_codes) if table.group_size else ()
        sizes = (indices.shape[0], width, _KIND_CODES[table.kind], int(add), *groups)
        tensors = (table.data, indices, out, table.scales, table.offsets)
        native.launch("lg_take_packed_rows", tensors, sizes, (scale,), num_tasks=out.shape[0])
        return out
    if isinstance(table, QuantizedWeight):
        rows = table.rows(indices).dequantize()
    else:
        rows = table.index_select(0, indices).float()
    rows *= scale
    return out.copy_(rows + out if add else rows)
