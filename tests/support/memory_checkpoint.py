"""A Checkpoint over a transformers model in memory, for tests of everything behind the files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from legato.worker.models.hf_config import model_config
from legato.worker.weights.checkpoint import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from legato.kernels.weight import QuantizedWeight


class MemoryCheckpoint:
    """Hands out the model's tensors; `finish` fails where one was not asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        values = json.loads(model.config.to_json_string(use_diff=False))
        self.config = model_config(values, "memory")
        self.tensors = dict(model.state_dict())
        if self.config.tie_word_embeddings:
            # A stale head, as some files hold: whoever reads it gives wrong logits.
            self.tensors["lm_head.weight"] = torch.zeros(1)
        self._unread = set(self.tensors)
        self.finished = False

    @property
    def native_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def fingerprint(self) -> str:
        return "memory"

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name} is missing")
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name} is {tuple(tensor.shape)}, expected {shape}")
        self._unread.discard(name)
        return tensor.detach().to(dtype, copy=True)

    can_keep = auto_keeps = False

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        return None

    def finish(self) -> None:
        unread = self._unread - ({"lm_head.weight"} if self.config.tie_word_embeddings else set())
        if unread:
            raise CheckpointError(f"tensors never read: {sorted(unread)}")
        self.finished = True
