"""DecodeBatch: how many sequences decode together, how long steps are, who waits for a place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from legato.plan.prefill_queue import NO_WAIT, Wait

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """One worker in the long run; see `decode_batch`."""

    step_s: NDArray[np.float64]  # of a step of 1, 2, … sequences
    token_shares: NDArray[np.float64]  # of all tokens, those that came from such a step
    mean_sequences: float
    busy: float  # the share of the time in which there is any
    wait: Wait  # for a place in the batch

    def step_percentile_s(self, percent: float) -> float:
        """Of the tokens, `percent` came from steps that took no longer."""
        reached = np.searchsorted(np.cumsum(self.token_shares), percent / 100 * (1 - 1e-12))
        return float(self.step_s[min(int(reached), len(self.step_s) - 1)])


def decode_batch(
    step_s: NDArray[np.float64], tokens_per_s: float, answer_tokens: float, answer_squares: float
) -> DecodeBatch | None:
    """A batch of at most len(step_s) sequences, into which answers of `answer_tokens` on average
    come as a Poisson process, `tokens_per_s` tokens in all; None where these are too many.

    Every sequence in the batch of k gets a token each step_s[k - 1] seconds: processor sharing
    whose speed depends on k. In that queue the number of sequences depends on the mean length of
    the answers alone, whatever their distribution is:

        p(k) = p(k - 1) * tokens_per_s * step_s[k - 1] / k

    By Little's law its mean is the arrivals times the seconds in the batch. Who finds the batch
    full waits: then the batch is taken for so many exponential servers, with the mean wait scaled
    by the answers' variance.
    """
    limit = len(step_s)
    if tokens_per_s <= 0:
        shares = np.zeros(limit)
        shares[0] = 1.0
        return DecodeBatch(step_s, shares, 0.0, 0.0, NO_WAIT)
    full = tokens_per_s * float(step_s[-1]) / limit  # of what a full batch can do
    if full >= 1:
        return None
    sizes = np.arange(1, limit + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(tokens_per_s * step_s / sizes))])
    weights = np.exp(logs - logs.max())
    queued = (
        float(weights[-1]) * full / (1 - full)
    )  # as many full states more, one for each in line
    total = float(weights.sum()) + queued
    # A state makes sizes / step_s tokens a second: by the recursion, as many as arrivals find the
    # one below it.
    tokens = weights[:-1].copy()
    tokens[-1] += float(weights[-1]) + queued
    in_batch = float((weights[1:] * sizes).sum()) + queued * limit
    departures_per_s = limit / float(step_s[-1]) / answer_tokens
    mean_s = answer_squares / answer_tokens**2 / 2 / (departures_per_s * (1 - full))
    return DecodeBatch(
        step_s,
        tokens / tokens.sum(),
        mean_sequences=in_batch / total,
        busy=1 - float(weights[0]) / total,
        wait=Wait((float(weights[-1]) + queued) / total, mean_s),
    )
