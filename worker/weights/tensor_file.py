"""TensorFile: one safetensors file, whose tensors are read into memory of their own."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from legato.worker.weights.byte_file import ByteFile
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
    """Reads through a `ByteFile`."""

    def __init__(self, file: Path) -> None:
        """Opens the file and checks its header.

        Raises:
            CheckpointError: it cannot be read, or its header contradicts itself.
        """
        self._file = file
        try:
            with safe_open(file, framework="pt", device="cpu"):  # knows what a header must be
                self._bytes = ByteFile(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: cannot be read: {bare(str(error))}") from error
        self._tensors = {tensor.name: tensor for tensor in read_header(file)}

    def get_tensor(self, name: str) -> Tensor:
        """A tensor of the file, on the CPU.

        Raises:
            CheckpointError: it cannot be read, or the file has become shorter.
        """
        shape = self._tensors[name].shape
        return self.get_rows(name, 0, shape[0]) if shape else self._read(name, (), 0)

    def get_rows(self, name: str, start: int, stop: int) -> Tensor:
        """The rows `start : stop` of a tensor that has a dimension; errors as of `get_tensor`."""
        stored = self._tensors[name]
        return self._read(name, (stop - start, *stored.shape[1:]), start)

    def _read(self, name: str, shape: tuple[int, ...], first_row: int) -> Tensor:
        stored = self._tensors[name]
        if stored.dtype not in _DTYPES:
            raise CheckpointError(
                f"{self._file}: tensor {bare(name)} has dtype {bare(stored.dtype)}"
            )
        tensor = torch.empty(shape, dtype=_DTYPES[stored.dtype])
        item_bytes = tensor.itemsize
        assert stored.num_bytes == prod(stored.shape) * item_bytes, "safetensors had to refuse it"
        self._bytes.read_into(
            tensor, stored.start + first_row * prod(stored.shape[1:]) * item_bytes, name
        )
        return tensor
