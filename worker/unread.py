"""UnreadTokens: tokens that a device has sampled and whose values are not on the CPU yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from torch import Tensor

    from legato.worker.sequence import Sequence


class UnreadTokens:
    """The next step reads them where they are: only their places are known."""

    def __init__(self, sequences: SequenceOf[Sequence], token_ids: Tensor) -> None:
        """`token_ids` [R] int64 on the device: of `sequences` in order, a row for each answer."""
        self._rows: dict[Sequence, int] = {}  # of the first answer
        num_rows = 0
        for sequence in sequences:
            self._rows[sequence] = num_rows
            num_rows += sequence.num_answers
        self._token_ids = token_ids

    def copy_into(self, token_ids: Tensor, places: list[tuple[int, Sequence]]) -> None:
        """token_ids[place] = the sequence's unread token, for each (place, sequence)."""
        if places:
            device = token_ids.device
            to = torch.tensor([place for place, _ in places], device=device)
            rows = torch.tensor([self._rows[sequence] for _, sequence in places], device=device)
            # A broken row's -1 ends its sequence when it is read; until then it is no index.
            token_ids[to] = self._token_ids[rows].clamp(min=0)
