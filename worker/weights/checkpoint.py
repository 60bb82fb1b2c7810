"""Checkpoint: named tensors of a model under Hugging Face names, and the model's config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from legato.worker.weights.quoting import one_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from legato.kernels.weight import QuantizedWeight
    from legato.worker.models.config import ModelConfig


class CheckpointError(ValueError):
    """A checkpoint that cannot be served; the message names file, tensor and what is wrong.

    Much of it comes from files: the message is kept to one line of bounded length.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class Checkpoint(Protocol):
    """Weights of one model, read lazily. Names and shapes are those of `tensor_table`, which are
    Hugging Face's, whatever the file calls them.
    """

    config: ModelConfig

    @property
    def native_dtype(self) -> torch.dtype:
        """The dtype that `--dtype auto` takes on an accelerator."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex digest over config and weights; equal for equal models."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Reads one tensor on the CPU.

        Raises:
            CheckpointError: it is missing, or has another shape, or holds NaN or infinity.
        """
        ...

    @property
    def can_keep(self) -> bool:
        """Whether `quantized` has something to hand out."""
        ...

    @property
    def auto_keeps(self) -> bool:
        """Whether `--weights auto` uses it: where the files were quantised by a method."""
        ...

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        """Reads one matrix [N, K] on the CPU in the form in which it is stored.

        None where it is stored as floats, or in a form that `QuantizedWeight` cannot hold: then
        `tensor` reads it.

        Raises:
            CheckpointError: as `tensor` does.
        """
        ...

    def finish(self) -> None:
        """Checks that every tensor of the files was read; raises CheckpointError naming extras."""
        ...
