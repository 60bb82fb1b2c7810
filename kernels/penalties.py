"""penalties: bias, repetition, presence and frequency changes to one row of logits."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


def add_bias(logits: Tensor, bias: Mapping[int, float]) -> None:
    """logits[id] += bias[id] for a row [vocab_size], in place."""
    ids = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
    values = torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
    logits.index_add_(0, ids, values)


def penalize_repetition(logits: Tensor, token_ids: Collection[int], penalty: float) -> None:
    """Divides positive and multiplies negative logits of every id that occurs, once, in place."""
    ids = torch.tensor(sorted(set(token_ids)), dtype=torch.int64, device=logits.device)
    values = logits.index_select(0, ids)
    logits.index_copy_(0, ids, torch.where(values > 0, values / penalty, values * penalty))


def penalize_output(
    logits: Tensor, output_token_ids: Sequence[int], presence: float, frequency: float
) -> None:
    """Subtracts presence + frequency * count for every id of the output, in place."""
    counts = Counter(output_token_ids)
    ids = torch.tensor(list(counts), dtype=torch.int64, device=logits.device)
    amounts = [presence + frequency * count for count in counts.values()]
    logits.index_add_(0, ids, -torch.tensor(amounts, dtype=logits.dtype, device=logits.device))


def ban(logits: Tensor, token_ids: Collection[int]) -> None:
    """logits[id] = -inf, in place."""
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)
    logits.index_fill_(0, ids, -torch.inf)
