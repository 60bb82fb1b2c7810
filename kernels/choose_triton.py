"""Triton kernels and launchers of argmax and choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from legato.kernels.counter_rng_triton import uniform
from legato.kernels.layout import require_contiguous, require_contiguous_rows

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.choose import Choices

_BLOCK = 4096
_NUM_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def argmax_of_row(
    logits_ptr: tl.tensor,
    vocab_size: int,
    BLOCK: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
) -> tuple[tl.tensor, tl.tensor]:
    """The largest logit of a row and its lowest id; -1 with NaN or without a finite maximum."""
    lanes = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    ids = tl.zeros((BLOCK,), dtype=tl.int32)
    broken = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, vocab_size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + i, mask=i < vocab_size, other=float("-inf"))
        broken |= (x != x).to(tl.int32)
        ids = tl.where(x > lanes, i, ids)
        lanes = tl.where(x > lanes, x, lanes)
    best = tl.max(lanes, axis=0)
    most_likely = tl.min(tl.where(lanes == best, ids, vocab_size), axis=0)
    bad = (tl.max(broken, axis=0) > 0) | (tl.abs(best) == float("inf"))
    return best, tl.where(bad, -1, most_likely)


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _argmax_kernel(
    logits_ptr: tl.tensor,
    out_ptr: tl.tensor,
    vocab_size: int,
    row_stride: int,
    BLOCK: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
) -> None:
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    _, most_likely = argmax_of_row(logits_ptr + row * row_stride, vocab_size, BLOCK)
    tl.store(out_ptr + row, most_likely.to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _weights(x: tl.tensor, best: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """int64; see kernels.draw_weights for the steps and their numbers."""
    quotients = tl.div_rn(best - x, tl.zeros_like(x) + temperature)
    z = (tl.minimum(quotients, 43.0) * 48408812.0).to(tl.int32)
    fraction = (z & 0x1FFFFFF).to(tl.int64)
    power = 2737501 - ((fraction * 234126) >> 25)
    power = 20571132 - ((power * fraction) >> 25)
    power = 119165493 - ((power * fraction) >> 25)
    power = 515877902 - ((power * fraction) >> 25)
    power = 1488521986 - ((power * fraction) >> 25)
    power = 2147483648 - ((power * fraction) >> 25)
    return (power << 9) >> (z >> 25).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _key(x: tl.tensor) -> tl.tensor:
    """int32 in the order of the logits; -0.0 equals 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _amount(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    vocab_size: int,
    least: tl.tensor,
    BY_WEIGHT: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    BLOCK: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """How many keys are `least` (int64) or more, or their weight."""
    lanes = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, vocab_size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < vocab_size
        x = tl.load(logits_ptr + i, mask=inside, other=float("-inf"))
        counted = inside & (_key(x).to(tl.int64) >= least)
        if BY_WEIGHT:
            lanes += tl.load(weights_ptr + i, mask=counted, other=0)
        else:
            lanes += counted.to(tl.int64)
    return tl.sum(lanes, axis=0)


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _keep_prefix(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    vocab_size: int,
    best: tl.tensor,
    lowest: tl.tensor,
    target: tl.tensor,
    BY_WEIGHT: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Keeps the shortest best-first prefix whose amount reaches `target`; the weights of the others
    become 0. The key at its end, between those of `lowest` and `best`, is found by bisection.
    """
    low = lowest
    high = _key(best).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        if _amount(logits_ptr, weights_ptr, vocab_size, middle, BY_WEIGHT, BLOCK) >= target:
            low = middle
        else:
            high = middle - 1
    left = target - _amount(logits_ptr, weights_ptr, vocab_size, low + 1, BY_WEIGHT, BLOCK)
    if BY_WEIGHT:
        lanes = tl.full((BLOCK,), 1, dtype=tl.int64)
        for start in range(0, vocab_size, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + i, mask=i < vocab_size, other=float("-inf"))
            at_end = (i < vocab_size) & (_key(x).to(tl.int64) == low)
            lanes = tl.maximum(lanes, tl.load(weights_ptr + i, mask=at_end, other=0))
        each = tl.max(lanes, axis=0)  # tokens of one logit have one weight
        left = (left + each - 1) // each
    seen = left * 0
    tl.debug_barrier()
    for start in range(0, vocab_size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < vocab_size
        x = tl.load(logits_ptr + i, mask=inside, other=float("-inf"))
        key = _key(x).to(tl.int64)
        at_end = (inside & (key == low)).to(tl.int64)
        lost = (key < low) | ((at_end > 0) & (seen + tl.cumsum(at_end, axis=0) > left))
        tl.store(weights_ptr + i, tl.zeros((BLOCK,), dtype=tl.int64), mask=inside & lost)
        seen += tl.sum(at_end, axis=0)
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _total(
    weights_ptr: tl.tensor,
    vocab_size: int,
    BLOCK: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
) -> tl.tensor:
    lanes = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, vocab_size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        lanes += tl.load(weights_ptr + i, mask=i < vocab_size, other=0)
    return tl.sum(lanes, axis=0)


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _draw(
    weights_ptr: tl.tensor,
    vocab_size: int,
    number: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
) -> tl.tensor:
    """The first id at which the running sum reaches `number` of the whole."""
    total = _total(weights_ptr, vocab_size, BLOCK)
    goal = tl.minimum(tl.ceil(total.to(tl.float64) * number).to(tl.int64), total)
    i = tl.arange(0, BLOCK)
    block = tl.load(weights_ptr + i, mask=i < vocab_size, other=0)
    before = goal * 0
    amount = tl.sum(block, axis=0)
    while before + amount < goal:
        before += amount
        i += BLOCK
        block = tl.load(weights_ptr + i, mask=i < vocab_size, other=0)
        amount = tl.sum(block, axis=0)
    reached = before + tl.cumsum(block, axis=0) >= goal
    return tl.min(tl.where(reached, i, vocab_size), axis=0)


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _choose_kernel(
    logits_ptr: tl.tensor,
    reals_ptr: tl.tensor,
    integers_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    vocab_size: int,
    row_stride: int,
    BLOCK: tl.constexpr,  # noqa: N803  # constexprs are capitals in Triton
) -> None:
    """One program a row. `weights`: int64 [R, vocab_size], memory to work in."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    weights_ptr += row * vocab_size
    temperature = tl.load(reals_ptr + row * 3).to(tl.float32)
    best, most_likely = argmax_of_row(logits_ptr, vocab_size, BLOCK)
    if (most_likely < 0) | (temperature == 0.0):
        tl.store(out_ptr + row, most_likely.to(tl.int64))
    else:
        for start in range(0, vocab_size, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + i, mask=i < vocab_size, other=float("-inf"))
            tl.store(weights_ptr + i, _weights(x, best, temperature), mask=i < vocab_size)
        # What one thread wrote, another one reads.
        tl.debug_barrier()
        top_k = tl.load(integers_ptr + row * 3)
        if (top_k > 0) & (top_k < vocab_size):
            lowest = top_k * 0 - 2147483648
            _keep_prefix(logits_ptr, weights_ptr, vocab_size, best, lowest, top_k, False, BLOCK)
        top_p = tl.load(reals_ptr + row * 3 + 1)
        if top_p < 1.0:
            total = _total(weights_ptr, vocab_size, BLOCK)
            target = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
            if target < total:
                # Further below the best one nothing has any weight.
                lowest = _key(best - 30.0 * temperature).to(tl.int64)
                _keep_prefix(logits_ptr, weights_ptr, vocab_size, best, lowest, target, True, BLOCK)
        min_p = tl.load(reals_ptr + row * 3 + 2)
        if min_p > 0.0:
            least = tl.ceil(min_p * 1099511627776.0).to(tl.int64)
            for start in range(0, vocab_size, BLOCK):
                i = start + tl.arange(0, BLOCK)
                weights = tl.load(weights_ptr + i, mask=i < vocab_size, other=0)
                tl.store(
                    weights_ptr + i, tl.where(weights >= least, weights, 0), mask=i < vocab_size
                )
            tl.debug_barrier()
        number = uniform(tl.load(integers_ptr + row * 3 + 1), tl.load(integers_ptr + row * 3 + 2))
        drawn = _draw(weights_ptr, vocab_size, number, BLOCK)
        tl.store(out_ptr + row, drawn.to(tl.int64))


def argmax(logits: Tensor, out: Tensor) -> Tensor:
    """See kernels.choose."""
    require_contiguous_rows(logits=logits)
    num_rows, vocab_size = logits.shape
    if num_rows:
        _argmax_kernel[(num_rows,)](
            logits,
            out,
            vocab_size,
            logits.stride(0),
            BLOCK=block_size(vocab_size),
            num_warps=_NUM_WARPS,
        )
    return out


def choose(logits: Tensor, choices: Choices, out: Tensor) -> Tensor:
    """See kernels.choose."""
    require_contiguous_rows(logits=logits)
    require_contiguous(reals=choices.reals, integers=choices.integers)
    num_rows, vocab_size = logits.shape
    weights = torch.empty(num_rows, vocab_size, dtype=torch.int64, device=logits.device)
    if num_rows:
        _choose_kernel[(num_rows,)](
            logits,
            choices.reals,
            choices.integers,
            weights,
            out,
            vocab_size,
            logits.stride(0),
            BLOCK=block_size(vocab_size),
            num_warps=_NUM_WARPS,
        )
    return out


def block_size(vocab_size: int) -> int:
    """Columns of a row at a time."""
    return min(_BLOCK, int(triton.next_power_of_2(vocab_size)))
