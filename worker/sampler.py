"""Sampler: from logits to the next token of every row, independent of the row's neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from legato.worker.sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingRow:
    """One row of a sampling batch: a request at one output position."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # emitted so far; the next token's index is its length
    banned_token_ids: frozenset[int]  # EOS and stop tokens while min_tokens is not reached


@dataclass(frozen=True)
class Sampled:
    """The chosen token, and its logprobs where the request asked for them."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Chooses one token a row.

    Args:
        logits: [R, vocab_size] fp32.
        rows: R of them.
    """
    raise NotImplementedError
