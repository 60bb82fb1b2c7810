"""TensorFile: one safetensors file, whose tensors are read into memory of their own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.quoting import bare
from legato.worker.weights.safetensors_files import read_header

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorFile:
    """Reads with `pread`, not through a mapping: a mapping's pages stay in the process's memory
    beside the tensors made from them, and a file cut short while it is read kills the process.
    """

    def __init__(self, file: Path) -> None:
        """Opens the file and checks its header.

        Raises:
            CheckpointError: it cannot be read, or its header contradicts itself.
        """
        self._file = file
        try:
            with safe_open(file, framework="pt", device="cpu"):  # knows what a header must be
                self._descriptor = os.open(file, os.O_RDONLY)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: cannot be read: {bare(str(error))}") from error
        self._tensors = {tensor.name: tensor for tensor in read_header(file)}

    def get_tensor(self, name: str) -> Tensor:
        """A tensor of the file, on the CPU.

        Raises:
            CheckpointError: it cannot be read, or the file has become shorter.
        """
        stored = self._tensors[name]
        if stored.dtype not in _DTYPES:
            raise CheckpointError(
                f"{self._file}: tensor {bare(name)} has dtype {bare(stored.dtype)}"
            )
        tensor = torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
        if not tensor.numel():
            return tensor
        left: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
        assert len(left) == stored.num_bytes, "a header that safetensors had to refuse"
        position = stored.start
        try:
            while left:
                count = os.preadv(self._descriptor, [left], position)
                if not count:
                    raise CheckpointError(f"{self._file}: was cut short at tensor {bare(name)}")
                left, position = left[count:], position + count
        except OSError as error:
            raise CheckpointError(f"{self._file}: tensor {bare(name)}: {error}") from error
        return tensor

    def __del__(self) -> None:
        """Closes the file."""
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)
