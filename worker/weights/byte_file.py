"""ByteFile: a checkpoint's file, from which ranges of bytes are read into memory of their own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.quoting import bare

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


class ByteFile:
    """Reads with `pread`, not through a mapping: a mapping's pages stay in the process's memory
    beside the tensors made from them, and a file cut short while it is read kills the process.
    """

    def __init__(self, file: Path) -> None:
        """
        Raises:
            OSError: it cannot be opened.
        """
        self._file = file
        self._descriptor = os.open(file, os.O_RDONLY)

    def read(self, start: int, stop: int, name: str) -> Tensor:
        """The bytes `start : stop`, uint8, of the tensor `name`.

        Raises:
            CheckpointError: they cannot be read, or the file has become shorter.
        """
        tensor = torch.empty(stop - start, dtype=torch.uint8)
        self.read_into(tensor, start, name)
        return tensor

    def read_into(self, tensor: Tensor, start: int, name: str) -> None:
        """Fills a contiguous tensor with the bytes from `start` on; errors as of `read`."""
        if not tensor.numel():
            return
        left: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
        try:
            while left:
                count = os.preadv(self._descriptor, [left], start)
                if not count:
                    raise CheckpointError(f"{self._file}: was cut short at tensor {bare(name)}")
                left, start = left[count:], start + count
        except OSError as error:
            raise CheckpointError(f"{self._file}: tensor {bare(name)}: {error}") from error

    def __del__(self) -> None:
        """Closes the file."""
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)
