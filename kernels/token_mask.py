"""token_mask: takes all tokens but some out of rows of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from legato.kernels.layout import require_contiguous_rows, require_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor


def mask_tokens(logits: Tensor, allowed: Mapping[int, NDArray[np.int32]]) -> None:
    """Sets the logits of all tokens that a row does not allow to -inf, in place, without waiting
    for the device.

    Args:
        logits: [R, V] fp32; rows may have any stride.
        allowed: by row: at least V / 32 words, token i at bit i % 32 of word i // 32.

    Raises:
        ValueError: there is no such row, or it has too few words.
    """
    require_dtype(logits, torch.float32, "logits")
    require_contiguous_rows(logits=logits)
    num_rows, num_tokens = logits.shape
    num_words = -(-num_tokens // 32)
    for row, words in allowed.items():
        if not 0 <= row < num_rows:
            raise ValueError(f"a row must be in [0, {num_rows}), got {row}")
        if len(words) < num_words:
            raise ValueError(f"row {row} has {len(words)} words for {num_tokens} tokens")
    if not allowed:
        return
    if logits.is_cuda:
        _mask_on_device(logits, allowed, num_words)
        return
    # Not torch's operations: their threads would get in the way of the model's.
    array = logits.numpy()
    for row, words in allowed.items():
        bits = np.unpackbits(words.view(np.uint8), count=num_tokens, bitorder="little")
        np.copyto(array[row], -np.inf, where=bits == 0)


def _mask_on_device(
    logits: Tensor, allowed: Mapping[int, NDArray[np.int32]], num_words: int
) -> None:
    words = torch.from_numpy(np.stack([words[:num_words] for words in allowed.values()]))
    rows = torch.tensor(list(allowed)).pin_memory().to(logits.device, non_blocking=True)
    words = words.pin_memory().to(logits.device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = ((words[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(bits == 0, -torch.inf)
