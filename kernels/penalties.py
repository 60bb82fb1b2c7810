"""penalties: changes to single logits of a batch: bias, repetition, presence, frequency, bans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from legato.kernels import native
from legato.kernels.choose import argmax
from legato.kernels.layout import require_contiguous_rows, require_dtype

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

# Columns of the amounts.
_BIAS, _REPETITION, _SUBTRACT = range(3)


@dataclass(frozen=True)
class RowChanges:
    """What one row's request does to its logits, by token id; each id occurs once."""

    ids: NDArray[np.int64]  # [n], ascending
    amounts: NDArray[np.float32]  # [n, 3]: bias, repetition penalty, amount to subtract
    banned_ids: NDArray[np.int64]  # [m]


@dataclass(frozen=True)
class LogitChanges:
    """The changes of P rows, one after the other: contiguous tensors on the logits' device."""

    rows: Tensor  # [P] int64, each once
    starts: Tensor  # [P + 1, 2] int64: where a row's ids begin, and its banned ids; then the ends
    ids: Tensor  # [N] int64, of one row each once
    amounts: Tensor  # [N, 3] fp32, as RowChanges.amounts
    banned_ids: Tensor  # [M] int64

    @classmethod
    def of(cls, changes: Mapping[int, RowChanges], logits: Tensor) -> LogitChanges:
        """The changes of one row or more, each row's by its number in logits [R, V].

        Raises:
            ValueError: there is no such row or id; an id's amounts are missing.
        """
        parts = list(changes.values())
        rows = np.fromiter(changes, np.int64, len(parts))
        sizes = [(len(part.ids), len(part.banned_ids)) for part in parts]
        starts = np.concatenate(([(0, 0)], np.cumsum(sizes, axis=0)))
        ids = np.concatenate([part.ids for part in parts])
        banned_ids = np.concatenate([part.banned_ids for part in parts])
        amounts = np.concatenate([part.amounts for part in parts])
        if amounts.shape != (len(ids), 3):
            raise ValueError(f"amounts must have shape {(len(ids), 3)}, got {amounts.shape}")
        for name, numbers, limit in (
            ("a row", rows, logits.shape[0]),
            ("an id", ids, logits.shape[1]),
            ("a banned id", banned_ids, logits.shape[1]),
        ):
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < limit:
                found = f"{numbers.min()} to {numbers.max()}"
                raise ValueError(f"{name} must be in [0, {limit}), got {found}")
        integers = (rows, starts.ravel(), ids, banned_ids)
        whole = _on_device(np.concatenate(integers), logits.device)
        pieces = torch.split(whole, [len(piece) for piece in integers])
        amounts_there = _on_device(amounts, logits.device)
        return cls(pieces[0], pieces[1].view(-1, 2), pieces[2], amounts_there, pieces[3])


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
    finite, however extreme the change: an infinite one is the mark of a broken row. All devices
    give the same bits.

    Args:
        logits: rows may have any stride.
        changes: by row.
    """
    require_dtype(logits, torch.float32, "logits")
    require_contiguous_rows(logits=logits)
    if not changes:
        return
    flat = LogitChanges.of(changes, logits)
    if logits.is_cuda:
        from legato.kernels import penalties_triton

        penalties_triton.change_logits(logits, flat)
        return
    if native.takes(logits):
        saved = torch.empty(len(flat.banned_ids))
        tensors = (logits, flat.rows, flat.starts, flat.ids, flat.amounts, flat.banned_ids, saved)
        sizes = (len(flat.rows), logits.shape[1], logits.stride(0))
        native.launch("lg_change_logits", tensors, sizes, num_tasks=len(flat.rows))
        return
    _change_logits(logits, flat)


def _change_logits(logits: Tensor, changes: LogitChanges) -> None:
    num_ids, num_bans = changes.starts.diff(dim=0).unbind(1)
    rows, ids = changes.rows.repeat_interleave(num_ids), changes.ids
    bias, repetition, subtract = changes.amounts.unbind(1)
    before = logits[rows, ids]
    values = before + bias
    values = torch.where(values > 0, values / repetition, values * repetition) - subtract
    largest = torch.finfo(values.dtype).max
    values = values.clamp(-largest, largest).where(before.isfinite(), values)
    logits.index_put_((rows, ids), values)
    rows, ids = changes.rows.repeat_interleave(num_bans), changes.banned_ids
    if not len(ids):
        return
    before = logits[rows, ids]
    logits.index_put_((rows, ids), before.new_tensor(-torch.inf))
    lifted = argmax(logits)[rows] < 0
    logits.index_put_((rows, ids), before.where(lifted, -torch.inf))


def _on_device(array: NDArray[np.int64] | NDArray[np.float32], device: torch.device) -> Tensor:
    """A copy that the device may still be making: from pinned memory, for a large one from other
    memory waits until the device has done what it was given before.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
