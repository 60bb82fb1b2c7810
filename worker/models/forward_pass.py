"""ForwardPass: a batch on its way through a model, and the buffers that all layers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.kernels.rows import take_rows
from legato.worker.prompt_scores import rows_a_piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from legato.worker.forward import ForwardBatch
    from legato.worker.kv.cache import KvCache
    from legato.worker.models.config import ModelConfig
    from legato.worker.prompt_scores import ScoredRows

# What an MLP makes of so many tokens stays in a CPU's caches until it is used, and the buffers of
# long prompts stay small. (256 and 1,024 were no quicker.)
CPU_PIECE_TOKENS = 512


@dataclass(frozen=True)
class ForwardPass:
    """Made once a forward; with the CPU's kernels nothing else is allocated on the way, so that it
    can be recorded as a list of them and run again.
    """

    batch: ForwardBatch
    cache: KvCache
    residual: Tensor  # [T, hidden_size]
    hidden: Tensor  # [T, hidden_size], what a block reads, and then what it adds to the residual
    qkv: Tensor  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
    attended: Tensor  # [T, num_heads, head_dim]
    inner: Tensor  # [P, intermediate_size], P <= T, the input of an MLP's second half
    last: Tensor  # [R, hidden_size], rows whose logits are wanted
    logits: Tensor  # [R, vocab_size] fp32

    @classmethod
    def begin(
        cls, config: ModelConfig, batch: ForwardBatch, cache: KvCache, dtype: torch.dtype
    ) -> ForwardPass:
        """`dtype` is that of the activations."""
        num_tokens, num_rows = batch.token_ids.shape[0], batch.logit_rows.shape[0]
        device = batch.token_ids.device

        def buffer(*shape: int) -> Tensor:
            return batch.empty(*shape, dtype=dtype, device=device)

        num_heads = config.num_heads + 2 * config.num_kv_heads
        piece = min(num_tokens, CPU_PIECE_TOKENS) if device.type == "cpu" else num_tokens
        return cls(
            batch=batch,
            cache=cache,
            residual=buffer(num_tokens, config.hidden_size),
            hidden=buffer(num_tokens, config.hidden_size),
            qkv=buffer(num_tokens, num_heads * config.head_dim),
            attended=buffer(num_tokens, config.num_heads, config.head_dim),
            inner=buffer(piece, config.intermediate_size),
            last=buffer(num_rows, config.hidden_size),
            logits=batch.empty(num_rows, config.vocab_size, dtype=torch.float32, device=device),
        )

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The tokens of `hidden` and `inner` that an MLP takes at a time."""
        size = self.inner.shape[0]
        for start in range(0, self.hidden.shape[0], size):
            hidden = self.hidden[start : start + size]
            yield hidden, self.inner[: hidden.shape[0]]

    def finish(self, head: Callable[[Tensor, Tensor], Tensor], *, add_hidden: bool) -> Tensor:
        """The logits, behind the scores of prompts' tokens, whose logits come a piece at a time.

        `head` turns rows [N, hidden_size], which it may overwrite, into logits [N, vocab_size];
        with `add_hidden`, `hidden` is what the last block has yet to add to the residual.
        """
        if self.batch.scores is not None:
            self._score(self.batch.scores, head, add_hidden=add_hidden)
        if self.last.shape[0]:  # not in the middle of a prompt
            self.take_last(add_hidden=add_hidden)
            head(self.last, self.logits)
        return self.logits

    def take_last(self, *, add_hidden: bool) -> None:
        """Fills `last`."""
        self._take(self.batch.logit_rows, self.last, add_hidden=add_hidden)

    def _take(self, rows: Tensor, out: Tensor, *, add_hidden: bool) -> None:
        take_rows(self.residual, rows, out)
        if add_hidden:
            take_rows(self.hidden, rows, out, add=True)

    def _score(
        self, scores: ScoredRows, head: Callable[[Tensor, Tensor], Tensor], *, add_hidden: bool
    ) -> None:
        vocab_size = self.logits.shape[1]
        num_rows = min(rows_a_piece(vocab_size), scores.rows.shape[0])
        device = self.last.device
        hidden = self.batch.empty(
            num_rows, self.last.shape[1], dtype=self.last.dtype, device=device
        )
        logits = self.batch.empty(num_rows, vocab_size, dtype=torch.float32, device=device)
        for rows, take in scores.pieces(num_rows):
            count = rows.shape[0]
            self._take(rows, hidden[:count], add_hidden=add_hidden)
            take(head(hidden[:count], logits[:count]))
