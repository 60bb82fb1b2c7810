"""choose: a token a row of logits, the most likely one or a draw by the request's settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.kernels import native
from legato.kernels.counter_rng import uniforms
from legato.kernels.draw_weights import POINT, draw_weights
from legato.kernels.layout import (
    require_contiguous,
    require_contiguous_rows,
    require_dtype,
    require_shape,
)


@dataclass(frozen=True)
class Choices:
    """The settings of R rows, contiguous tensors on the logits' device."""

    reals: Tensor  # [R, 3] fp64: temperature, >= 1e-5 or 0 (greedy); top_p (0, 1]; min_p [0, 1]
    integers: Tensor  # [R, 3] int64: top_k, 0 is off; seed, its bits; output index


def argmax(logits: Tensor) -> Tensor:
    """The most likely token of each row [R, V] fp32, of equal ones the lowest id: [R] int64.

    A row that holds NaN, or has no finite maximum, gets -1.
    """
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    require_contiguous_rows(logits=logits)
    if logits.is_cuda:
        from legato.kernels import choose_triton

        return choose_triton.argmax(logits, out)
    if native.takes(logits):
        sizes = (*logits.shape, logits.stride(0))
        native.launch("lg_argmax", (logits, out), sizes, num_tasks=logits.shape[0])
        return out
    return out.copy_(_argmax(logits))


def choose(logits: Tensor, choices: Choices) -> Tensor:
    """One token a row, [R] int64; -1 for a row that holds NaN or has no finite maximum.

    Greedy rows get their `argmax`. For the others every token weighs what `draw_weights` says.
    Of the tokens in order of their logits, best first and equal ones by lower id, top-k keeps the
    first k; of these top-p the fewest whose weight reaches `top_p` of their sum; of these min-p
    those of at least `min_p` of the best one's weight. What is left is summed up by ascending id,
    and the token is the first one whose sum reaches `counter_rng.uniform(seed, index)` of the
    whole: never one without weight. All sums are of whole numbers, so a row's token is the same on
    every device, and its neighbours have no part in it.

    Args:
        logits: [R, V] fp32, V <= 2^22; rows may have any stride.
        choices: of R rows.
    """
    num_rows, vocab_size = logits.shape
    require_contiguous_rows(logits=logits)
    require_contiguous(reals=choices.reals, integers=choices.integers)
    require_shape(choices.reals, (num_rows, 3), "reals")
    require_shape(choices.integers, (num_rows, 3), "integers")
    require_dtype(logits, torch.float32, "logits")
    require_dtype(choices.reals, torch.float64, "reals")
    require_dtype(choices.integers, torch.int64, "integers")
    if vocab_size > 1 << (62 - POINT):
        raise ValueError(f"vocab_size must be at most {1 << (62 - POINT)}, got {vocab_size}")
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if logits.is_cuda:
        from legato.kernels import choose_triton

        return choose_triton.choose(logits, choices, out)
    if native.takes(logits):
        tensors = (logits, choices.reals, choices.integers, out)
        sizes = (num_rows, vocab_size, logits.stride(0))
        native.launch("lg_choose", tensors, sizes, num_tasks=num_rows)
        return out
    return out.copy_(_choose(logits, choices))


def _argmax(logits: Tensor) -> Tensor:
    best, ids = logits.max(-1)  # NaN if anything in the row is
    return ids.where(best.isfinite(), -1)


def _choose(logits: Tensor, choices: Choices) -> Tensor:
    temperatures, top_p, min_p = choices.reals.unbind(1)
    top_k, seeds, indices = choices.integers.unbind(1)
    greedy = _argmax(logits)
    draws = temperatures > 0
    best = logits.gather(1, greedy.clamp(min=0)[:, None]).squeeze(1)
    weights = draw_weights(logits, best, temperatures.where(draws, 1.0))
    if bool(((top_k > 0) | (top_p < 1)).any()):
        order = (logits + 0.0).sort(dim=-1, descending=True, stable=True).indices  # -0.0 equals 0.0
        ranked = weights.gather(1, order)
        limits = top_k.where(top_k > 0, logits.shape[1])
        ranked *= torch.arange(logits.shape[1], device=logits.device) < limits[:, None]
        mass = (ranked.sum(-1) * top_p).ceil()
        ranked *= (ranked.cumsum(-1) - ranked < mass[:, None]) | (top_p == 1)[:, None]
        weights = torch.empty_like(weights).scatter_(1, order, ranked)
    weights *= weights >= (min_p * (1 << POINT)).ceil()[:, None]
    sums = weights.cumsum(-1)
    goals = (sums[:, -1] * uniforms(seeds, indices)).ceil().long().minimum(sums[:, -1])
    drawn = torch.searchsorted(sums, goals[:, None]).squeeze(1)
    return torch.where(draws & (greedy >= 0), drawn, greedy)
