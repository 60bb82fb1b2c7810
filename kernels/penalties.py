"""penalties: changes to single logits of a batch: bias, repetition, presence, frequency, bans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from legato.kernels.choose import argmax

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

# Columns of LogitChanges.amounts.
_BIAS, _REPETITION, _SUBTRACT = range(3)


@dataclass(frozen=True)
class RowChanges:
    """What one row's request does to its logits, by token id; each id occurs once."""

    ids: NDArray[np.int64]  # [n], ascending
    amounts: NDArray[np.float32]  # [n, 3]: bias, repetition penalty, amount to subtract
    banned_ids: NDArray[np.int64]  # [m]


def row_changes(
    *,
    bias: Mapping[int, float],
    seen_ids: Sequence[int],
    repetition: float,
    output_ids: Sequence[int],
    presence: float,
    frequency: float,
    banned_ids: Collection[int],
) -> RowChanges:
    """In this order: adds the bias; divides a positive logit of every id in `seen_ids`, and
    multiplies a negative one, by `repetition`, once; subtracts presence + frequency * count for
    every id in `output_ids`; sets the banned ones to -inf.
    """
    biased = np.fromiter(bias, np.int64, len(bias))
    seen = np.unique(np.asarray(seen_ids, np.int64))
    written, counts = np.unique(np.asarray(output_ids, np.int64), return_counts=True)
    ids = np.unique(np.concatenate((biased, seen, written)))
    amounts = np.zeros((len(ids), 3), np.float32)
    amounts[:, _REPETITION] = 1.0
    amounts[np.searchsorted(ids, biased), _BIAS] = np.fromiter(bias.values(), np.float64, len(bias))
    amounts[np.searchsorted(ids, seen), _REPETITION] = repetition
    amounts[np.searchsorted(ids, written), _SUBTRACT] = presence + frequency * counts
    return RowChanges(ids, amounts, np.fromiter(banned_ids, np.int64, len(banned_ids)))


def change_logits(logits: Tensor, changes: Mapping[int, RowChanges]) -> None:
    """Makes each row's changes to logits [R, V] fp32, in place, without waiting for the device.

    Bans that would leave a row no token at all (a tiny vocabulary) are lifted. A finite logit stays
    finite, however extreme the change: an infinite one is the mark of a broken row.

    Args:
        logits: rows may have any stride.
        changes: by row.
    """
    rows, ids, amounts = _flat({row: (c.ids, c.amounts) for row, c in changes.items()}, logits)
    if len(ids):
        bias, repetition, subtract = amounts.unbind(1)
        before = logits[rows, ids]
        values = before + bias
        values = torch.where(values > 0, values / repetition, values * repetition) - subtract
        largest = torch.finfo(values.dtype).max
        values = values.clamp(-largest, largest).where(before.isfinite(), values)
        logits.index_put_((rows, ids), values)
    bans = {row: (c.banned_ids, None) for row, c in changes.items() if len(c.banned_ids)}
    if not bans:
        return
    rows, ids, _ = _flat(bans, logits)
    before = logits[rows, ids]
    logits.index_put_((rows, ids), before.new_tensor(-torch.inf))
    lifted = argmax(logits)[rows] < 0
    logits.index_put_((rows, ids), before.where(lifted, -torch.inf))


def _flat(
    parts: Mapping[int, tuple[NDArray[np.int64], NDArray[np.float32] | None]], like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """All rows' entries one after the other, on the device of `like`: rows, ids and amounts."""
    rows = np.repeat(list(parts), [len(ids) for ids, _ in parts.values()])
    ids = np.concatenate([ids for ids, _ in parts.values()])
    amounts = [a for _, a in parts.values() if a is not None] or [np.zeros((0, 3), np.float32)]
    return (
        torch.from_numpy(rows).to(like.device, non_blocking=True),
        torch.from_numpy(ids).to(like.device, non_blocking=True),
        torch.from_numpy(np.concatenate(amounts)).to(like.device, non_blocking=True),
    )
