"""PagedRows: rows of many layers between a pool's pages and one buffer, with its checksum.

The buffer is [num_layers, 2 (K, V), num_tokens, num_heads, head_dim] in the wire's dtype, C order;
where that has 8 bits, the scales [num_layers, 2, num_tokens, num_heads] fp32 follow. It does not
depend on blocks. Rows are converted where the pages have another dtype: see `kernels.kv_quantize`.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Protocol

import numpy as np

from legato.kernels import native
from legato.kernels.buffer_address import buffer_address
from legato.kernels.kv_pages import NATIVE_DTYPES, QUANTIZED_DTYPES, check_pages
from legato.kernels.kv_rows_torch import TorchRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from legato.kernels.kv_pages import KvPages

_SCALE_BYTES = 4  # fp32
_RANGE = struct.Struct("11q")  # lg_kv_range


class RowsPlace(Protocol):
    """A rectangle: layers, tokens of a sequence, KV heads. All counts are at least 1."""

    @property
    def layer_start(self) -> int:
        """Of the pool."""

    @property
    def num_layers(self) -> int:
        """From there on."""

    @property
    def token_start(self) -> int:
        """Of the sequence."""

    @property
    def num_tokens(self) -> int:
        """From there on."""

    @property
    def head_start(self) -> int:
        """Of the KV heads."""

    @property
    def num_heads(self) -> int:
        """From there on."""


def rows_bytes(rows: RowsPlace, head_dim: int, dtype: torch.dtype) -> int:
    """Of the buffer, scales included."""
    head = head_dim * dtype.itemsize + (_SCALE_BYTES if dtype in QUANTIZED_DTYPES else 0)
    return rows.num_layers * 2 * rows.num_tokens * rows.num_heads * head


class PagedRows:
    """Used by one thread at a time, which runs it alone, without the interpreter lock and without
    waiting for the threads of a forward pass.
    """

    def __init__(self, layers: Sequence[KvPages], block_size: int) -> None:
        """`layers`: all of the pool, alike."""
        first = layers[0]
        for pages in layers:
            check_pages(pages)
        self._layers = layers
        self._block_size = block_size
        self._torch: TorchRows | None = None
        if first.k.is_cuda or not native.available():
            self._torch = TorchRows(layers, block_size)
            return
        pointers = (
            0 if part is None else part.data_ptr()
            for pages in layers
            for part in (pages.k, pages.v, pages.k_scale, pages.v_scale)
        )
        self._table = struct.pack(f"{4 * len(layers)}P", *pointers)
        self._read = native.direct(
            "lg_kv_read",
            ctypes.c_uint32,
            *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p),
            *(ctypes.c_void_p, ctypes.c_uint32),
        )
        self._write = native.direct(
            "lg_kv_write",
            ctypes.c_uint32,
            *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
        )
        self._kept = np.empty(0, np.uint8)

    def read(
        self,
        blocks: Sequence[int],
        rows: RowsPlace,
        dtype: torch.dtype,
        into: memoryview,
        seed: int,
    ) -> int:
        """Fills `into` in the wire's `dtype`; returns its CRC32C, behind what `seed` is that of.

        Args:
            blocks: the sequence's, from its first token on.
            into: contiguous and writable, of `rows_bytes` bytes.

        Raises:
            ValueError: the rows are not within the pool's shape or the blocks, or `into` does not
                fit them.
        """
        used = self._check(blocks, rows, dtype, into)
        if into.readonly:
            raise ValueError("into must be writable")
        if self._torch is not None:
            return self._torch.read(blocks, rows, dtype, into, seed)
        place = self._place(rows, dtype)
        return int(self._read(place, self._table, used, buffer_address(into), seed))

    def write(
        self,
        blocks: Sequence[int],
        rows: RowsPlace,
        dtype: torch.dtype,
        data: memoryview,
        seed: int,
        crc: int,
    ) -> bool:
        """Lands `data`; returns whether its CRC32C behind `seed` is `crc`. Every thread and stream
        sees the rows then; where it is another, these rows of the pages hold anything.

        What lands are the bytes that were checked, even of memory that others write meanwhile.

        Raises:
            ValueError: as of `read`; nothing was written.
        """
        used = self._check(blocks, rows, dtype, data)
        if self._torch is not None:
            return self._torch.write(blocks, rows, dtype, data, seed, crc)
        kept = 0
        if dtype in QUANTIZED_DTYPES or dtype != self._layers[0].dtype:
            if len(self._kept) < data.nbytes:
                self._kept = np.empty(data.nbytes, np.uint8)
            kept = self._kept.ctypes.data
        place = self._place(rows, dtype)
        return bool(self._write(place, self._table, used, buffer_address(data), kept, seed) == crc)

    def _check(
        self, blocks: Sequence[int], rows: RowsPlace, dtype: torch.dtype, buffer: memoryview
    ) -> bytes:
        """The ids of the blocks that hold the rows, for C."""
        heads = self._layers[0].num_kv_heads
        for name, start, count, limit in (
            ("layers", rows.layer_start, rows.num_layers, len(self._layers)),
            ("tokens", rows.token_start, rows.num_tokens, len(blocks) * self._block_size),
            ("KV heads", rows.head_start, rows.num_heads, heads),
        ):
            if start < 0 or count < 1 or start + count > limit:
                raise ValueError(f"{name} {start} to {start + count} are not within [0, {limit})")
        expected = rows_bytes(rows, self._layers[0].head_dim, dtype)
        if buffer.nbytes != expected:
            raise ValueError(f"the buffer has {buffer.nbytes} bytes, the rows have {expected}")
        first = rows.token_start // self._block_size
        last = (rows.token_start + rows.num_tokens - 1) // self._block_size
        return struct.pack(f"{last - first + 1}q", *blocks[first : last + 1])

    def _place(self, rows: RowsPlace, dtype: torch.dtype) -> bytes:
        pages = self._layers[0]
        return _RANGE.pack(
            rows.layer_start,
            rows.num_layers,
            rows.token_start,
            rows.num_tokens,
            rows.head_start,
            rows.num_heads,
            self._block_size,
            pages.num_kv_heads,
            pages.head_dim,
            NATIVE_DTYPES[pages.dtype],
            NATIVE_DTYPES[dtype],
        )
