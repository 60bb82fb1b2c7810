"""load_model: from a WorkerConfig to a model with its weights on its device."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.kernels.linear import set_deterministic
from legato.worker.kv.cache import KvShape
from legato.worker.spare_memory import keep_little
from legato.worker.weights.open import open_checkpoint
from legato.worker.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from legato.worker.config import WorkerConfig
    from legato.worker.forward import Model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what it was made from."""

    model: Model
    fingerprint: str  # of the files; lowering the context length does not change it
    weights: str  # see `MatrixForm.name`
    dtype: torch.dtype
    device: torch.device
    source: Path


def load_model(
    config: WorkerConfig, on_progress: Callable[[int, int], None] | None = None
) -> LoadedModel:
    """Finds, checks and loads the model that `config` names.

    `on_progress` is passed to `build_model`: called with tensors read so far, and in all.

    Raises:
        ValueError: the device is not there, the context length is beyond the model's, the KV
            memory holds no block, or the checkpoint cannot be served (`CheckpointError`); the
            message says what and where.
    """
    keep_little()
    set_deterministic(enabled=config.deterministic)
    device = choose_device(config.device)
    source = resolve_model(config.model)
    checkpoint = open_checkpoint(source)
    limit = checkpoint.config.context_length
    if config.context_length is not None:
        if config.context_length > limit:
            raise ValueError(
                f"context_length {config.context_length} is beyond the model's own {limit}"
            )
        checkpoint.config = dataclasses.replace(
            checkpoint.config, context_length=config.context_length
        )
    dtype = choose_dtype(config.dtype, device, checkpoint.native_dtype)
    KvShape.of(checkpoint.config, config, dtype)  # refuses too little memory for it now
    # Here, so that a wrong model or setting is refused before the kernels are imported.
    from legato.worker.models.build import build_model
    from legato.worker.weights.matrix_form import MatrixForm

    form = MatrixForm(config.weights, checkpoint)
    model = build_model(checkpoint, device, dtype, on_progress, form)  # finishes the checkpoint
    return LoadedModel(model, checkpoint.fingerprint, form.name(dtype), dtype, device, source)


def choose_device(name: str) -> torch.device:
    """The device for "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        ValueError: unknown, or not on this machine.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    match = re.fullmatch(r"auto|cuda(?::(\d+))?", name)
    if match is None:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if not torch.cuda.is_available():
        raise ValueError(
            f"device {name!r} was asked for, but torch sees no CUDA device; use cpu or auto"
        )
    index = int(match[1] or 0)
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"device {name!r} was asked for, but there are only {torch.cuda.device_count()} "
            "CUDA devices, counted from 0"
        )
    return torch.device("cuda", index)


def choose_dtype(name: str, device: torch.device, native: torch.dtype) -> torch.dtype:
    """The dtype for a name; "auto" is float32 on a CPU, else the checkpoint's own."""
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device.type == "cpu" else native
