"""choose: one token from one row of logits by temperature, top-k, top-p, min-p and a number."""

from __future__ import annotations

import torch
from torch import Tensor

# How many candidates are sorted for top-p: the next number, at last the whole vocabulary, only
# where the mass of these is too small. For 49,152 logits the first takes 0.4 ms, a full sort 3 ms.
_CANDIDATE_COUNTS = (1024, 8192)


def best_candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of a row [vocab_size], best first, equal ones by lower id.

    Returns:
        Values and ids, [min(count, vocab_size)] each.
    """
    if count >= logits.shape[0]:
        values, ids = logits.sort(descending=True, stable=True)
        return values, ids
    # topk alone picks any of several equal values at its edge; take all and cut after the sort.
    edge = logits.topk(count).values[-1]
    ids = (logits >= edge).nonzero().squeeze(-1)
    values, order = logits[ids].sort(descending=True, stable=True)
    return values[:count], ids[order[:count]]


def choose(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float, number: float
) -> Tensor:
    """Draws by the inverse of the cumulative distribution; returns the token's id, a scalar.

    In this order: temperature, top-k, top-p on what is left, min-p. top-p keeps the smallest set
    of the most likely tokens whose mass reaches `top_p`. The running sum is fp64, and the token is
    the first one whose sum reaches `number` of the whole: never one without mass.

    Args:
        logits: [vocab_size] fp32; the largest is finite.
        temperature: > 0.
        top_k: 0 or >= vocab_size: off.
        top_p: in (0, 1]; 1: off.
        min_p: in [0, 1]; 0: off.
        number: in (0, 1].
    """
    ids: Tensor | None = None  # None: all, in order
    if 0 < top_k < logits.shape[0]:
        logits, ids = best_candidates(logits, top_k)
    # The maximum goes first, so that no quotient overflows; the best token's weight is 1.
    weights = ((logits - logits.max()) / temperature).exp_()
    if top_p < 1.0:
        weights, ids = _nucleus(weights, ids, top_p)
    if min_p > 0.0:
        weights = weights.where(weights >= min_p, 0.0)
    sums = weights.cumsum(0, dtype=torch.float64)
    place = torch.searchsorted(sums, sums[-1:] * number)[0]
    return place if ids is None else ids[place]


def _nucleus(weights: Tensor, ids: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """The smallest best-first set whose share of the mass reaches `top_p`."""
    mass = weights.sum(dtype=torch.float64) * top_p
    if ids is None:
        weights, ids = _enough_candidates(weights, mass)
    before = weights.cumsum(0, dtype=torch.float64) - weights
    count = max(1, int((before < mass).sum()))
    return weights[:count], ids[:count]


def _enough_candidates(weights: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Best-first candidates whose weights sum to `mass` at least; all of them if need be."""
    for count in _CANDIDATE_COUNTS:
        best, ids = best_candidates(weights, count)
        if best.sum(dtype=torch.float64) >= mass:
            return best, ids
    return best_candidates(weights, weights.shape[0])
