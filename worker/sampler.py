"""Sampler: from logits to the next token of every row, independent of the row's neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.kernels.choose import Choices, argmax, choose
from legato.kernels.counter_rng import signed_seed
from legato.kernels.logprobs import logprobs
from legato.kernels.penalties import RowChanges, change_logits, row_changes
from legato.kernels.rows import take_rows

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


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Chooses one token a row.

    A row is worked on in this order: bias, repetition penalty, presence and frequency penalties,
    bans; then the most likely token where the request is greedy, else a draw with the number that
    (seed, output index) names. Logprobs are those of the untouched logits. Where the bans would
    leave no token at all (a tiny vocabulary), they are lifted for that token. All rows are worked
    on at once; a row's result has the same bits in any company.

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
    changes = {r: change for r, row in enumerate(rows) if (change := _changes(row)) is not None}
    if all(row.params.greedy for row in rows) and not changes:
        tokens = argmax(logits)
    else:
        changed = logits
        if changes:
            changed = _rows(logits, range(len(rows)))
            change_logits(changed, changes)
        tokens = choose(changed, _choices(rows, logits.device))
        if changes:  # a ban may have hidden what is broken
            tokens = tokens.where(argmax(logits) >= 0, -1)
    asked = [r for r, row in enumerate(rows) if row.params.logprobs is not None]
    token_ids: list[int] = tokens.tolist()
    broken = [r for r, token_id in enumerate(token_ids) if token_id < 0]
    if broken:
        raise FloatingPointError(f"logits of rows {broken} have no finite maximum")
    sampled = [Sampled(token_id, None, ()) for token_id in token_ids]
    if asked:
        _attach_logprobs(sampled, logits, tokens, rows, asked)
    return sampled


def _choices(rows: Sequence[SamplingRow], device: torch.device) -> Choices:
    settings = [(row.params, len(row.output_token_ids)) for row in rows]
    reals = [(0.0 if p.greedy else p.temperature, p.top_p, p.min_p) for p, _ in settings]
    integers = [(p.top_k, signed_seed(p.seed), index) for p, index in settings]
    return Choices(
        torch.tensor(reals, dtype=torch.float64).to(device, non_blocking=True),
        torch.tensor(integers, dtype=torch.int64).to(device, non_blocking=True),
    )


def _changes(row: SamplingRow) -> RowChanges | None:
    """None where nothing changes the row's logits."""
    params = row.params
    penalizes_output = bool(
        row.output_token_ids and (params.presence_penalty or params.frequency_penalty)
    )
    repetition = params.repetition_penalty != 1.0
    if not (params.logit_bias or repetition or penalizes_output or row.banned_token_ids):
        return None
    return row_changes(
        bias=params.logit_bias,
        seen_ids=[*row.prompt_token_ids, *row.output_token_ids] if repetition else (),
        repetition=params.repetition_penalty,
        output_ids=row.output_token_ids if penalizes_output else (),
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        banned_ids=row.banned_token_ids,
    )


def _attach_logprobs(
    sampled: list[Sampled],
    logits: Tensor,
    tokens: Tensor,
    rows: Sequence[SamplingRow],
    asked: Sequence[int],
) -> None:
    """Replaces the rows that asked, with logprobs from the model's own logits."""
    counts = [rows[r].params.logprobs or 0 for r in asked]
    if len(asked) < len(rows):
        logits = _rows(logits, asked)
        tokens = tokens[torch.tensor(asked, device=logits.device)]
    own, values, ids = (t.tolist() for t in logprobs(logits, tokens, max(counts)))
    for i, (r, count) in enumerate(zip(asked, counts, strict=True)):
        top = tuple(zip(ids[i][:count], values[i][:count], strict=True))
        sampled[r] = Sampled(sampled[r].token_id, own[i], top)


def _rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """A copy of these rows, without torch's threads: two teams on the same cores get in the way
    of each other.
    """
    out = logits.new_empty((len(rows), logits.shape[1]))
    return take_rows(logits.contiguous(), torch.tensor(rows, device=logits.device), out)
