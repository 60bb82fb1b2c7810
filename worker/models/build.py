"""build_model: a checkpoint's tensors, fused and packed, as a model on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.kernels import native
from legato.worker.models.gemma3 import Gemma3Model
from legato.worker.models.gpt2 import Gpt2Model
from legato.worker.models.llama import LlamaModel
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.matrix_form import MatrixForm
from legato.worker.weights.quoting import quoted
from legato.worker.weights.weight_reader import WeightReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.worker.forward import Model
    from legato.worker.models.config import ModelConfig
    from legato.worker.weights.checkpoint import Checkpoint

_MODELS: dict[str, Callable[[ModelConfig, WeightReader], Model]] = {
    "llama": LlamaModel,
    "qwen2": LlamaModel,
    "qwen3": LlamaModel,
    "gemma3": Gemma3Model,
    "gpt2": Gpt2Model,
}


def build_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None = None,
    form: MatrixForm | None = None,
) -> Model:
    """Reads every tensor of the checkpoint, one at a time, and builds its model.

    Args:
        checkpoint: is finished afterwards.
        device: where the weights go.
        dtype: of all weights that are not quantised.
        on_progress: told (tensors read, tensors in all) after each one.
        form: of the matrices; None: "auto".

    Raises:
        CheckpointError: the architecture is not served, or a tensor is missing or wrong.
    """
    architecture = checkpoint.config.architecture
    if architecture not in _MODELS:
        raise CheckpointError(
            f"architecture {quoted(architecture)} is not supported; supported: {', '.join(_MODELS)}"
        )
    form = MatrixForm("auto", checkpoint) if form is None else form
    reader = WeightReader(
        checkpoint, device, dtype, activation_dtype(device, dtype), on_progress, form
    )
    model = _MODELS[architecture](checkpoint.config, reader)
    checkpoint.finish()
    form.log_plain()
    return model


def activation_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """fp32 for the CPU kernels, which convert weights as they read them; else the weights' own."""
    return torch.float32 if device.type == "cpu" and native.available() else dtype
