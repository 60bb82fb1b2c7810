"""Logits: what a forward pass says of the next tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.kernels.rows import take_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from legato.worker.prompt_scores import ScoredRows


@dataclass(frozen=True)
class Logits:
    """A row for each sequence that samples."""

    values: Tensor  # [R, vocab_size] fp32
    best: Tensor | None = None  # [R] int64: their `kernels.choose.argmax`, where it is known
    scores: ScoredRows | None = None  # of prompts' tokens, where they were wanted

    def take(self, rows: Sequence[int]) -> Logits:
        """A copy of these rows, in this order; one may stand there more than once."""
        places = torch.tensor(rows, device=self.values.device)
        values = self.values.new_empty((len(rows), self.values.shape[1]))
        take_rows(self.values.contiguous(), places, values)
        return Logits(values, None if self.best is None else self.best[places])
