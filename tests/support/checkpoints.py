"""Reading and damaging checkpoints in tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from legato.worker.weights.tensor_table import model_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from legato.worker.weights.checkpoint import Checkpoint


def read_all(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every tensor that the config asks for; nothing may be left over."""
    tensors = {
        name: checkpoint.tensor(name, shape, dtype)
        for name, shape in model_tensors(checkpoint.config)
    }
    checkpoint.finish()
    return tensors


def edit_json(file: Path, **changes: Any) -> None:  # noqa: ANN401  # any JSON value
    """Sets fields; a value of ... takes one out."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Rewrites model.safetensors; names with __ for dots; None takes a tensor out."""
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
