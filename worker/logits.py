"""Logits: what a forward pass says of the next tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Logits:
    """A row for each sequence that samples."""

    values: Tensor  # [R, vocab_size] fp32
    best: Tensor | None = None  # [R] int64: their `kernels.choose.argmax`, where it is known
