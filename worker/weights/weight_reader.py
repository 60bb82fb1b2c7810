"""WeightReader: a checkpoint's tensors as the engine wants them: fused, packed, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.kernels import native
from legato.kernels.linear import pack_weight
from legato.worker.spare_memory import give_back_freed
from legato.worker.weights.matrix_form import MatrixForm, to_device
from legato.worker.weights.tensor_table import model_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from legato.kernels.weight import QuantizedWeight, Weight
    from legato.worker.weights.checkpoint import Checkpoint


class WeightReader:
    """Tensors by name; their shapes are those of `tensor_table`. Each is read once, and the
    largest thing made beside the weights themselves is one matrix.

    Attributes:
        dtype: of matrices and embeddings, before `pack_weight`.
        activation_dtype: of norms and biases, which meet activations only.
        recordable: whether a forward pass may be captured: it consists of kernels alone.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        activation_dtype: torch.dtype,
        on_progress: Callable[[int, int], None] | None = None,
        form: MatrixForm | None = None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.activation_dtype = activation_dtype
        self.recordable = device.type == "cuda" or native.available()
        self._checkpoint = checkpoint
        self._form = MatrixForm("auto", checkpoint) if form is None else form
        self._shapes = dict(model_tensors(checkpoint.config))
        self._on_progress = on_progress
        self._num_read = 0

    def matrix(self, *names: str, transposed: bool = False, gated: bool = False) -> Weight:
        """The weights of a linear layer, [out, in]: all of them come this way.

        Args:
            names: projections of the same input, which become one matrix, one below the other;
                without ".weight".
            transposed: the file has them [in, out].
            gated: they are a gate and what it is multiplied with, for `gated_linear`.
        """
        tensors = [f"{name}.weight" for name in names]
        kept = None if transposed else self._kept(tensors)
        if kept is not None:
            for _ in tensors:
                self._count()
            return pack_weight(kept, gated=gated)
        matrix = self._stacked(tensors, transposed)
        return pack_weight(self._form.of(tensors, matrix, self.dtype), gated=gated)

    def bias(self, *names: str) -> Tensor | None:
        """The biases that belong to `matrix(*names)`; None where the model has none."""
        parts = [f"{name}.bias" for name in names if f"{name}.bias" in self._shapes]
        if not parts:
            return None
        return torch.cat([self._read(name, self.activation_dtype) for name in parts]).to(
            self.device
        )

    def vector(self, name: str, *, plus: float = 0.0) -> Tensor:
        """A norm's weight or bias; `plus` is added in fp32."""
        if plus == 0.0:
            return self._read(name, self.activation_dtype).to(self.device)
        return self._read(name, torch.float32).add_(plus).to(self.device, self.activation_dtype)

    def embedding(self, name: str) -> Tensor:
        """A table of which `kernels.rows` takes rows, [rows, hidden_size]: never quantised."""
        return self._read(name, self.dtype).to(self.device)

    def _stacked(self, names: list[str], transposed: bool) -> Tensor:
        dtype = self._form.read_dtype(self.dtype)
        if len(names) == 1 and not transposed:
            return self._read(names[0], dtype).to(self.device)
        shapes = [self._shapes[name] for name in names]
        rows = [shape[1] if transposed else shape[0] for shape in shapes]
        width = shapes[0][0] if transposed else shapes[0][1]
        stacked = torch.empty(sum(rows), width, dtype=dtype, device=self.device)
        start = 0
        for name, count in zip(names, rows, strict=True):
            read = self._read(name, dtype)
            stacked[start : start + count] = read.t() if transposed else read
            start += count
        return stacked

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        give_back_freed()
        tensor = self._checkpoint.tensor(name, self._shapes[name], dtype)
        self._count()
        return tensor

    def _kept(self, names: list[str]) -> QuantizedWeight | None:
        kept = self._form.kept(names, [self._shapes[name] for name in names])
        return None if kept is None else to_device(kept, self.device)

    def _count(self) -> None:
        self._num_read += 1
        if self._on_progress is not None:
            self._on_progress(self._num_read, len(self._shapes))
