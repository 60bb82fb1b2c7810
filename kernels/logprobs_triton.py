"""Triton kernel and launcher of what logprobs divides by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from legato.kernels.layout import require_contiguous_rows

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _log_sums_kernel(
    logits_ptr: tl.tensor,
    out_ptr: tl.tensor,
    vocab_size: int,
    row_stride: int,
    BLOCK: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
) -> None:
    """One program a row, block by block in order: no other row has a part in its bits."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    lanes = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        lanes = tl.maximum(lanes, tl.load(logits_ptr + i, mask=i < vocab_size, other=float("-inf")))
    best = tl.max(lanes, axis=0)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + i, mask=i < vocab_size, other=float("-inf"))
        sums += tl.exp(x - best)
    tl.store(out_ptr + row * 2, best)
    tl.store(out_ptr + row * 2 + 1, tl.log(tl.sum(sums, axis=0)))


def log_sums(logits: Tensor) -> Tensor:
    """[R, V] to [R, 2] fp32: the best logit, and log(sum of e^(logit - best))."""
    require_contiguous_rows(logits=logits)
    out = torch.empty((logits.shape[0], 2), dtype=torch.float32, device=logits.device)
    if out.numel():
        _log_sums_kernel[(logits.shape[0],)](
            logits, out, logits.shape[1], logits.stride(0), BLOCK=_BLOCK, num_warps=8
        )
    return out
