"""KvModel: a model of a real KV shape that has no weights: its KV is only moved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from legato.worker.config import WorkerConfig
from legato.worker.loading import DTYPES, LoadedModel
from legato.worker.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from legato.worker.config import Role
    from legato.worker.forward import ForwardBatch
    from legato.worker.kv.cache import KvCache

VOCAB_SIZE = 1024  # of no weight to the KV
CONTEXT_LENGTH = 8192


class KvModel:
    """SmolLM2-135M's layers, KV heads and head size. It is never run: rows are written by hand."""

    recordable = False

    def __init__(self) -> None:
        self.config = ModelConfig(
            architecture="kv-only",
            num_layers=30,
            hidden_size=576,
            intermediate_size=1536,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            vocab_size=VOCAB_SIZE,
            context_length=CONTEXT_LENGTH,
            norm_eps=1e-5,
            tie_word_embeddings=True,
        )

    def forward(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        """Raises RuntimeError."""
        raise RuntimeError("this model has no weights: it cannot be run")


def loaded_model(dtype: str) -> LoadedModel:
    """As a worker takes it; both sides have the same fingerprint."""
    return LoadedModel(
        KvModel(),
        fingerprint="legato.bench.handoff",
        weights="none",
        dtype=DTYPES[dtype],
        device=torch.device("cpu"),
        source=Path("kv-only"),
    )


def worker_config(role: Role, dtype: str, kv_memory_bytes: int) -> WorkerConfig:
    """Every prompt is sent whole: nothing of it may be found in a prefix cache."""
    return WorkerConfig(
        model="kv-only",
        role=role,
        dtype=dtype,
        kv_memory_bytes=kv_memory_bytes,
        swap_memory_bytes=0,
        admission="reserve",
        prefix_cache=False,
    )
