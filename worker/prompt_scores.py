"""PromptScores: logprobs of a prompt's tokens, taken from the passes that compute it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from legato.kernels.logprobs import logprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

# Of one piece's logits: all of a 32k prompt's with a vocabulary of 150k would be 18 GiB.
MAX_PIECE_BYTES = 32 << 20


def rows_a_piece(vocab_size: int) -> int:
    """So many rows of logits are computed at a time, at least 1."""
    return max(1, MAX_PIECE_BYTES // (4 * vocab_size))


@dataclass(eq=False)
class PromptScores:
    """One prompt's, as far as it is computed. Of its first token there are none."""

    count: int  # most likely tokens at each position
    own: list[Tensor] = field(default_factory=list)  # [N] fp32, of the tokens themselves
    top_values: list[Tensor] = field(default_factory=list)  # [N, count] fp32, best first
    top_ids: list[Tensor] = field(default_factory=list)  # [N, count] int64
    broken: bool = False  # some are NaN: the model's logits were, or infinite

    def add(self, own: Tensor, top_values: Tensor, top_ids: Tensor) -> None:
        """Of the next tokens; there may be more of the most likely ones than `count`."""
        self.own.append(own)
        self.top_values.append(top_values[:, : self.count])
        self.top_ids.append(top_ids[:, : self.count])
        self.broken |= bool(own.isnan().any())


@dataclass(eq=False)
class ScoredRows:
    """What one pass has to score: tokens of it, and what follows on each in its prompt."""

    rows: Tensor  # [N] int64, indices of the pass's tokens
    targets: Tensor  # [N] int64, the token ids that follow
    count: int  # of the most likely ones, for the prompt that asks for the most
    shares: Sequence[tuple[PromptScores, int]]  # whose rows they are, and how many, in order
    _results: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    _event: torch.cuda.Event | None = None

    def pieces(self, num_rows: int) -> Iterator[tuple[Tensor, Callable[[Tensor], None]]]:
        """Up to `num_rows` rows at a time, and who takes their logits [N, vocab_size] fp32."""
        for start in range(0, self.rows.shape[0], num_rows):
            targets = self.targets[start : start + num_rows]

            def take(logits: Tensor, targets: Tensor = targets) -> None:
                self._results.append(logprobs(logits, targets, self.count))

            yield self.rows[start : start + num_rows], take

    def fetch(self) -> None:
        """Starts the copy from a device, which must not wait for the pass behind this one."""
        if not self.rows.is_cuda:
            return
        self._results = [
            (_fetched(own), _fetched(values), _fetched(ids)) for own, values, ids in self._results
        ]
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type
        self._event.record()

    def collect(self) -> None:
        """Waits for the pass, and hands everybody what is theirs."""
        if self._event is not None:
            self._event.synchronize()
        own, values, ids = (torch.cat(parts) for parts in zip(*self._results, strict=True))
        start = 0
        for scores, num_rows in self.shares:
            end = start + num_rows
            scores.add(own[start:end].clone(), values[start:end].clone(), ids[start:end].clone())
            start = end
        assert start == own.shape[0], "a row is nobody's"


def _fetched(values: Tensor) -> Tensor:
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return copy.copy_(values, non_blocking=True)
