"""ForwardBatch: everything one forward pass needs to know, for prefill and decode alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.attention_plan import AttentionPlan
    from legato.worker.kv.cache import KvCache
    from legato.worker.layer_reports import LayerReports
    from legato.worker.models.config import ModelConfig
    from legato.worker.prompt_scores import ScoredRows


class Empty(Protocol):
    """Gives uninitialised contiguous memory."""

    def __call__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of that shape."""
        ...


def new_tensor(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """From torch."""
    return torch.empty(shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class ForwardBatch:
    """The new tokens of S sequences, packed without padding (varlen).

    The plan says which tokens are whose: they are the last ones of their sequence's context, and
    attend causally to all rows of it, themselves included. A decode step is the case of one new
    token a sequence.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, position in the sequence, from 0
    slots: Tensor  # [T] int64, block id * block size + offset, where K and V of each token go
    plan: AttentionPlan
    logit_rows: Tensor  # [R] int64, indices into T of the tokens whose logits are wanted
    empty: Empty = new_tensor  # where intermediate results and the logits go
    reports: LayerReports | None = None  # told of each layer whose K and V are at their slots
    scores: ScoredRows | None = None  # tokens of prompts whose logprobs are wanted


class Model(Protocol):
    """A causal language model with its weights, on one device."""

    config: ModelConfig
    # Whether a forward pass consists of C kernels alone and may be recorded.
    recordable: bool

    def forward(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        """Writes K and V of all T tokens at their slots; returns logits [R, vocab_size] fp32."""
        ...
