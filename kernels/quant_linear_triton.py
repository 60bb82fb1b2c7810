"""Triton kernels and launcher of linear with quantised weights, 8 or 4 bits a value.

A row of the product has the same bits in every batch. K is cut into chunks of CHUNK; a chunk is
summed from zero by steps of BLOCK_K in order, and the chunks' sums are added in order, in fp32. So
it does not matter whether one program works through all chunks (many rows: there are programs
enough) or each has its own (few rows) and a second kernel adds. Nor does it matter that a tile
holds 16 rows or 32: below 64 every device multiplies by the same m16n8k16 instruction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from legato.kernels.layout import require_contiguous, require_contiguous_rows

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.weight import QuantizedWeight

CHUNK = 1024
_FEW_ROWS = 16  # up to here a tile holds 16 rows and 64 columns, then 32 and 128
_SPLIT_ROWS = 256  # up to here the chunks are spread over programs
_SUM_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _dequantize(
    q: tl.tensor,
    scales_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    group_start: tl.tensor,
    k: tl.tensor,
    inside: tl.tensor,
    rows_inside: tl.tensor,
    group_size: int,
    ONE_GROUP: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
) -> tl.tensor:
    """A tile q [BLOCK_N, len(k)] of the columns `k`, all of one group or each of its own."""
    if ONE_GROUP:
        at = group_start + tl.min(k, axis=0) // group_size
        scale = tl.load(scales_ptr + at, mask=rows_inside, other=0.0)[:, None]
        offset = tl.load(offsets_ptr + at, mask=rows_inside, other=0.0)[:, None]
    else:
        tile_at = group_start[:, None] + (k // group_size)[None, :]
        scale = tl.load(scales_ptr + tile_at, mask=inside, other=0.0)
        offset = tl.load(offsets_ptr + tile_at, mask=inside, other=0.0)
    return q.to(tl.float32) * scale + offset


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _quant_linear_kernel(
    x_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: int,
    num_out: int,
    num_in: int,
    groups: int,
    group_size: int,
    x_stride: int,
    values_stride: int,
    out_stride: int,
    BITS: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    ONE_GROUP: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    ACCUMULATE: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
) -> None:
    """One program a tile of BLOCK_M x BLOCK_N, and with SPLIT a chunk: then out is fp32
    [chunks, num_tokens, num_out], without bias.
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_inside, n_inside = m < num_tokens, n < num_out
    x_ptr += m[:, None] * x_stride
    values_ptr += n[:, None] * values_stride
    group_start = n * groups
    first = 0
    last = tl.cdiv(num_in, CHUNK)
    if SPLIT:
        first = tl.program_id(2)
        last = first + 1
        out_ptr += first.to(tl.int64) * num_tokens * out_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for chunk in range(first, last):
        partial = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(tl.cdiv(tl.minimum(num_in - chunk * CHUNK, CHUNK), BLOCK_K)):
            k = chunk * CHUNK + step * BLOCK_K + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + k, mask=m_inside[:, None] & (k < num_in)[None, :], other=0.0)
            if BITS == 8:
                inside = n_inside[:, None] & (k < num_in)[None, :]
                q = tl.load(values_ptr + k, mask=inside, other=0)
                tile = _dequantize(
                    q, scales_ptr, offsets_ptr, group_start, k, inside, n_inside, group_size,
                    ONE_GROUP,
                )  # fmt: skip
                partial = tl.dot(x, tl.trans(tile.to(x.dtype)), partial, input_precision="ieee")
            else:
                # All even columns, then all odd ones: the halves of a byte are never interleaved.
                pair = chunk * (CHUNK // 2) + step * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
                inside = n_inside[:, None] & (pair * 2 < num_in)[None, :]
                q = tl.load(values_ptr + pair, mask=inside, other=0)
                low = _dequantize(
                    q & 15, scales_ptr, offsets_ptr, group_start, pair * 2, inside, n_inside,
                    group_size, ONE_GROUP,
                )  # fmt: skip
                high = _dequantize(
                    q >> 4, scales_ptr, offsets_ptr, group_start, pair * 2 + 1, inside, n_inside,
                    group_size, ONE_GROUP,
                )  # fmt: skip
                even, odd = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_K // 2, 2)))
                partial = tl.dot(even, tl.trans(low.to(x.dtype)), partial, input_precision="ieee")
                partial = tl.dot(odd, tl.trans(high.to(x.dtype)), partial, input_precision="ieee")
        total += partial
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
    out_ptr += m[:, None] * out_stride + n[None, :]
    out_inside = m_inside[:, None] & n_inside[None, :]
    if ACCUMULATE:
        total += tl.load(out_ptr, mask=out_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr, total, mask=out_inside)


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _sum_chunks_kernel(
    partial_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_out: int,
    chunks: int,
    out_stride: int,
    HAS_BIAS: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    ACCUMULATE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One program for BLOCK columns of a row of partial [chunks, num_tokens, num_out]."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_out
    partial_ptr += row * num_out + n
    step = tl.num_programs(0).to(tl.int64) * num_out
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for chunk in range(chunks):
        total += tl.load(partial_ptr + chunk * step, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    out_ptr += row * out_stride + n
    if ACCUMULATE:
        total += tl.load(out_ptr, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr, total, mask=inside)


def linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor | None = None,
    *,
    accumulate: bool = False,
) -> Tensor:
    """See kernels.linear. The tiles of the weight are dequantised to x's dtype."""
    num_tokens, num_in = x.shape
    num_out = weight.out_features
    out = x.new_empty((num_tokens, num_out)) if out is None else out
    require_contiguous_rows(x=x, out=out)
    require_contiguous(values=weight.values, scales=weight.scales, offsets=weight.offsets)
    if not out.numel():
        return out
    chunks = triton.cdiv(num_in, CHUNK)
    split = chunks > 1 and num_tokens <= _SPLIT_ROWS
    shape = (chunks, num_tokens, num_out)
    target = torch.empty(shape, dtype=torch.float32, device=x.device) if split else out
    # fp32 has no such instruction: its tiles would not fit into registers.
    few = num_tokens <= _FEW_ROWS or x.dtype == torch.float32
    block_m, block_n = (16, 64) if few else (32, 128)
    block_k = _block_k(weight, x.dtype)
    grid = (
        triton.cdiv(num_tokens, block_m),
        triton.cdiv(num_out, block_n),
        chunks if split else 1,
    )
    _quant_linear_kernel[grid](
        x,
        weight.values,
        weight.scales,
        weight.offsets,
        x if bias is None else bias,
        target,
        num_tokens,
        num_out,
        num_in,
        weight.scales.shape[1],
        weight.group_size,
        x.stride(0),
        weight.values.stride(0),
        target.stride(-2),
        BITS=weight.bits,
        ONE_GROUP=weight.group_size >= num_in or weight.group_size % block_k == 0,
        HAS_BIAS=bias is not None and not split,
        ACCUMULATE=accumulate and not split,
        SPLIT=split,
        CHUNK=CHUNK,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
    if split:
        _sum_chunks_kernel[(num_tokens, triton.cdiv(num_out, _SUM_BLOCK))](
            target,
            x if bias is None else bias,
            out,
            num_out,
            chunks,
            out.stride(0),
            HAS_BIAS=bias is not None,
            ACCUMULATE=accumulate,
            BLOCK=_SUM_BLOCK,
        )
    return out


def _block_k(weight: QuantizedWeight, dtype: torch.dtype) -> int:
    """64, or 32 where that would leave a group (or the registers); the same for every batch."""
    in_one_group = weight.group_size % 64 == 0 or weight.group_size >= weight.in_features
    return 64 if in_one_group and dtype != torch.float32 else 32
