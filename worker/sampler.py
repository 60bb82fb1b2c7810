"""Sampler: from logits to the next token of every row, independent of the row's neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from legato.kernels.choose import best_candidates, choose
from legato.kernels.counter_rng import uniform
from legato.kernels.penalties import add_bias, ban, penalize_output, penalize_repetition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from legato.worker.sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingRow:
    """One row of a sampling batch: a request at one output position."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # emitted so far, as far as they are known
    banned_token_ids: frozenset[int]  # EOS and stop tokens while min_tokens is not reached
    num_unread: int = 0  # sampled tokens whose values have not come back from the device

    @property
    def index(self) -> int:
        """The next token's place in the answer."""
        return len(self.output_token_ids) + self.num_unread


@dataclass(frozen=True)
class Sampled:
    """The chosen token, and its logprobs where the request asked for them."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


class PendingTokens(Protocol):
    """Sampled tokens, on a device that may not have computed them yet."""

    @property
    def token_ids(self) -> Tensor:
        """[R] int64 on the device."""
        ...

    def collect(self) -> list[Sampled]:
        """Waits for them."""
        ...


@dataclass(frozen=True)
class ReadTokens:
    """Tokens that are on the CPU already."""

    sampled: list[Sampled]

    @property
    def token_ids(self) -> Tensor:
        """[R] int64."""
        return torch.tensor([s.token_id for s in self.sampled])

    def collect(self) -> list[Sampled]:
        """At once."""
        return self.sampled


def launch_sample(logits: Tensor, rows: Sequence[SamplingRow]) -> ReadTokens:
    """See `sample`; its result in the form that the engine takes from any device."""
    return ReadTokens(sample(logits, rows))


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Chooses one token a row.

    A row is worked on alone, in this order: bias, repetition penalty, presence and frequency
    penalties, bans; then the most likely token where the request is greedy, else a draw with the
    number that (seed, output index) names. Logprobs are those of the untouched logits. Where the
    bans would leave no token at all (a tiny vocabulary), they are lifted for that token.

    Args:
        logits: [R, vocab_size] fp32; left as they are.
        rows: R of them.

    Raises:
        FloatingPointError: a row holds NaN, or no finite maximum; names the rows.
    """
    if logits.shape[0] != len(rows):
        raise ValueError(f"logits have {logits.shape[0]} rows for {len(rows)} requests")
    if not rows:
        return []
    most_likely = logits.argmax(-1)
    # A row's maximum is NaN if anything in it is.
    finite = logits.gather(1, most_likely[:, None]).squeeze(1).isfinite().tolist()
    if not all(finite):
        broken = [r for r, ok in enumerate(finite) if not ok]
        raise FloatingPointError(f"logits of rows {broken} have no finite maximum")
    tokens = list(most_likely)
    for r, row in enumerate(rows):
        raw = logits[r]
        adjusted = _adjusted(raw, row)
        if not row.params.greedy:
            tokens[r] = choose(
                adjusted,
                temperature=row.params.temperature,
                top_k=row.params.top_k,
                top_p=row.params.top_p,
                min_p=row.params.min_p,
                number=uniform(row.params.seed, row.index),
            )
        elif adjusted is not raw:
            tokens[r] = adjusted.argmax()
    token_ids = torch.stack(tokens).tolist()
    return [_with_logprobs(logits[r], token_ids[r], row.params) for r, row in enumerate(rows)]


def _adjusted(logits: Tensor, row: SamplingRow) -> Tensor:
    """The row [vocab_size] itself where nothing changes it, else a changed copy."""
    params = row.params
    output_penalty = bool(
        row.output_token_ids and (params.presence_penalty or params.frequency_penalty)
    )
    repetition = params.repetition_penalty != 1.0
    if not (params.logit_bias or repetition or output_penalty or row.banned_token_ids):
        return logits
    logits = logits.clone()
    if params.logit_bias:
        add_bias(logits, params.logit_bias)
    if repetition:
        seen = {*row.prompt_token_ids, *row.output_token_ids}
        penalize_repetition(logits, seen, params.repetition_penalty)
    if output_penalty:
        penalize_output(
            logits, row.output_token_ids, params.presence_penalty, params.frequency_penalty
        )
    if row.banned_token_ids:
        allowed = logits.clone()
        ban(allowed, row.banned_token_ids)
        if allowed.max() > -torch.inf:
            logits = allowed
    return logits


def _with_logprobs(logits: Tensor, token_id: int, params: SamplingParams) -> Sampled:
    """Attaches what the request asked for, from the model's own logits."""
    if params.logprobs is None:
        return Sampled(token_id, None, ())
    logprobs = logits.float().log_softmax(-1)
    top: tuple[tuple[int, float], ...] = ()
    if params.logprobs:
        values, ids = best_candidates(logprobs, params.logprobs)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Sampled(token_id, float(logprobs[token_id]), top)
