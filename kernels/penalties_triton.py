"""Triton kernel and launcher of change_logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from legato.kernels.choose_triton import argmax_of_row, block_size
from legato.kernels.layout import require_contiguous, require_contiguous_rows, require_shape

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.penalties import LogitChanges

_BLOCK_IDS = 1024
_NUM_WARPS = 8


# Where the integers lie changes with their number: a version for every alignment would be compiled
# in the midst of serving.
@triton.jit(  # type: ignore[untyped-decorator]  # triton publishes no types
    do_not_specialize_on_alignment=["rows_ptr", "starts_ptr", "ids_ptr", "banned_ids_ptr"]
)
def _change_logits_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    amounts_ptr: tl.tensor,
    banned_ids_ptr: tl.tensor,
    saved_ptr: tl.tensor,
    vocab_size: int,
    row_stride: int,
    BLOCK: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    BLOCK_IDS: tl.constexpr,  # noqa: N803
) -> None:
    """One program a changed row. `saved`: fp32, memory to work in, as many as banned ids."""
    part = tl.program_id(0).to(tl.int64)
    logits_ptr += tl.load(rows_ptr + part) * row_stride
    starts_ptr += part * 2
    largest = 3.4028234663852886e38
    end = tl.load(starts_ptr + 2)
    for start in range(tl.load(starts_ptr), end, BLOCK_IDS):
        i = start + tl.arange(0, BLOCK_IDS)
        inside = i < end
        at = logits_ptr + tl.load(ids_ptr + i, mask=inside, other=0)
        before = tl.load(at, mask=inside, other=0.0)
        value = before + tl.load(amounts_ptr + i * 3, mask=inside, other=0.0)
        repetition = tl.load(amounts_ptr + i * 3 + 1, mask=inside, other=1.0)
        value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        value -= tl.load(amounts_ptr + i * 3 + 2, mask=inside, other=0.0)
        kept = tl.where(value > largest, largest, tl.where(value < -largest, -largest, value))
        value = tl.where(tl.abs(before) <= largest, kept, value)
        tl.store(at, value, mask=inside)
    begin, end = tl.load(starts_ptr + 1), tl.load(starts_ptr + 3)
    if begin < end:
        # What one thread wrote, another one reads.
        tl.debug_barrier()
        for start in range(begin, end, BLOCK_IDS):
            i = start + tl.arange(0, BLOCK_IDS)
            inside = i < end
            at = logits_ptr + tl.load(banned_ids_ptr + i, mask=inside, other=0)
            tl.store(saved_ptr + i, tl.load(at, mask=inside, other=0.0), mask=inside)
        tl.debug_barrier()  # an id may be banned twice
        for start in range(begin, end, BLOCK_IDS):
            i = start + tl.arange(0, BLOCK_IDS)
            inside = i < end
            at = logits_ptr + tl.load(banned_ids_ptr + i, mask=inside, other=0)
            tl.store(at, float("-inf"), mask=inside)
        tl.debug_barrier()
        _, most_likely = argmax_of_row(logits_ptr, vocab_size, BLOCK)
        if most_likely < 0:
            for start in range(begin, end, BLOCK_IDS):
                i = start + tl.arange(0, BLOCK_IDS)
                inside = i < end
                at = logits_ptr + tl.load(banned_ids_ptr + i, mask=inside, other=0)
                tl.store(at, tl.load(saved_ptr + i, mask=inside, other=0.0), mask=inside)


def change_logits(logits: Tensor, changes: LogitChanges) -> None:
    """See kernels.penalties."""
    require_contiguous_rows(logits=logits)
    num_parts, num_ids = changes.rows.shape[0], changes.ids.shape[0]
    require_shape(changes.starts, (num_parts + 1, 2), "starts")
    require_shape(changes.amounts, (num_ids, 3), "amounts")
    require_contiguous(**vars(changes))
    saved = torch.empty(changes.banned_ids.shape, dtype=logits.dtype, device=logits.device)
    vocab_size = logits.shape[1]
    if num_parts:
        _change_logits_kernel[(num_parts,)](
            logits,
            changes.rows,
            changes.starts,
            changes.ids,
            changes.amounts,
            changes.banned_ids,
            saved,
            vocab_size,
            logits.stride(0),
            BLOCK=block_size(vocab_size),
            BLOCK_IDS=_BLOCK_IDS,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,  # the same bits on every device
        )
