"""MatrixForm: in which form the matrices of one checkpoint are held in memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from legato.kernels.weight import QuantizedWeight
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.join_rows import join_rows
from legato.worker.weights.quantize import INT8, MODES, quantize
from legato.worker.weights.tensor_table import HEAD, embedding_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from legato.worker.weights.checkpoint import Checkpoint

_log = logging.getLogger(__name__)
_MAX_NAMES = 3


class MatrixForm:
    """`--weights`, seen together with what the checkpoint stores.

    "auto" keeps matrices that a quantising method wrote, and takes the dtype for all others,
    GGUF's blocks among them.
    """

    def __init__(self, weights: str, checkpoint: Checkpoint) -> None:
        """
        Raises:
            CheckpointError: "keep", and there is nothing to keep.
        """
        if weights not in ("auto", "keep", *MODES):
            raise ValueError(f"weights must be auto, keep or {', '.join(MODES)}, got {weights!r}")
        if weights == "keep" and not checkpoint.can_keep:
            raise CheckpointError(
                "weights 'keep' was asked for, but the checkpoint stores no matrix in a form that "
                "can be kept (GPTQ, AWQ, compressed-tensors, GGUF's Q4_0, Q4_1 and Q8_0); use auto"
            )
        self.mode = MODES.get(weights)
        self.keeps = weights == "keep" or (weights == "auto" and checkpoint.auto_keeps)
        if self.mode is not None and checkpoint.can_keep:
            _log.warning(
                "weights %s: the checkpoint's weights are quantised already; doing it again costs "
                "accuracy, keep would not",
                weights,
            )
        self._checkpoint = checkpoint
        self._vocabulary = {HEAD, embedding_name(checkpoint.config)}
        self._plain: dict[str, int] = {}  # matrices left in the dtype, and their bytes

    def name(self, dtype: torch.dtype) -> str:
        """What two workers must agree on: "float32", or "int4-g64+float32", the latter for the
        tensors that are not quantised.
        """
        plain = str(dtype).removeprefix("torch.")
        if self.mode is not None:
            return f"{self.mode}+{plain}"
        return f"keep+{plain}" if self.keeps else plain

    def read_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which a matrix is read: fp32 before it is quantised."""
        return dtype if self.mode is None else torch.float32

    def kept(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> QuantizedWeight | None:
        """The matrices [N, K] called `names` one below the other, just as they are stored.

        None where they are not to be kept, or cannot be.
        """
        if not self.keeps:
            return None
        parts = [
            self._checkpoint.quantized(name, shape)
            for name, shape in zip(names, shapes, strict=True)
        ]
        found = [part for part in parts if part is not None]
        return join_rows(found) if len(found) == len(parts) else None

    def of(
        self, names: Sequence[str], matrix: Tensor, dtype: torch.dtype
    ) -> Tensor | QuantizedWeight:
        """A float matrix [N, K] made of `names`, quantised where that is asked for.

        A head, or the embedding tied to it, has 8 bits where the others have 4: 4 bits cost more
        accuracy there than in all other matrices together (docs/quantization.md).
        """
        if self.mode is not None and matrix.shape[1] % 8 == 0:
            mode = self.mode if self._vocabulary.isdisjoint(names) else INT8
            try:
                return quantize(matrix, mode)
            except ValueError as error:
                raise CheckpointError(f"{', '.join(names)}: {error}") from error
        matrix = matrix.to(dtype)
        if self.mode is not None or self.keeps:
            self._plain[", ".join(names)] = matrix.numel() * matrix.itemsize
        return matrix

    def log_plain(self) -> None:
        """Says which matrices were left in the dtype although quantised ones were asked for."""
        if not self._plain:
            return
        names = list(self._plain)
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        _log.info(
            "%d matrices, %.1f MB, are not quantised and stay in the dtype: %s%s",
            len(names),
            sum(self._plain.values()) / 1e6,
            "; ".join(names[:_MAX_NAMES]),
            more,
        )


def to_device(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """The same weight with its tensors on `device`."""
    return QuantizedWeight(
        weight.bits,
        weight.in_features,
        weight.group_size,
        *(tensor.to(device) for tensor in (weight.values, weight.scales, weight.offsets)),
    )
