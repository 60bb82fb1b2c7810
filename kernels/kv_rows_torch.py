"""kv_rows in torch and Triton: for CUDA, and for CPUs without the C kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from legato.kernels.crc32c import crc32c
from legato.kernels.kv_pack import kv_pack, kv_unpack
from legato.kernels.kv_pages import QUANTIZED_DTYPES, KvPages, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from legato.kernels.kv_rows import RowsPlace


class TorchRows:
    """What `PagedRows` does, on the current stream; when a call returns, the device has done it."""

    def __init__(self, layers: Sequence[KvPages], block_size: int) -> None:
        self._layers = layers
        self._block_size = block_size
        self._device = layers[0].k.device
        self._staging = np.empty(0, np.uint8)  # of the host; pinned, so that a device copies itself
        self._staging_tensor = torch.empty(0, dtype=torch.uint8)

    def read(
        self,
        blocks: Sequence[int],
        rows: RowsPlace,
        dtype: torch.dtype,
        into: memoryview,
        seed: int,
    ) -> int:
        """See `PagedRows.read`."""
        slots = self._slots(blocks, rows)
        data, scales = self._empty(rows, self._layers[0].num_kv_heads, dtype)
        for i in range(rows.num_layers):
            pages = self._layers[rows.layer_start + i]
            kv_pack(pages, slots, data[i], None if scales is None else scales[i])
        heads = slice(rows.head_start, rows.head_start + rows.num_heads)
        staging = self._host_memory(into.nbytes)
        at = 0
        for part in (data, scales):
            if part is None:
                continue
            raw = part[:, :, :, heads].contiguous().view(torch.uint8).flatten()
            staging[at : at + len(raw)].copy_(raw, non_blocking=True)
            at += len(raw)
        self._wait()
        np.copyto(np.frombuffer(into, np.uint8), self._staging[: into.nbytes])
        return crc32c(into, seed)

    def write(
        self,
        blocks: Sequence[int],
        rows: RowsPlace,
        dtype: torch.dtype,
        data: memoryview,
        seed: int,
        crc: int,
    ) -> bool:
        """See `PagedRows.write`; what is checked and landed is a copy."""
        staging = self._host_memory(data.nbytes)
        np.copyto(self._staging[: data.nbytes], np.frombuffer(data, np.uint8))
        if crc32c(self._staging.data[: data.nbytes], seed) != crc:
            return False
        slots = self._slots(blocks, rows)
        landing, scales = self._empty(rows, rows.num_heads, dtype)
        at = 0
        for part in (landing, scales):
            if part is None:
                continue
            raw = part.view(torch.uint8).flatten()
            raw.copy_(staging[at : at + len(raw)], non_blocking=True)
            at += len(raw)
        for i in range(rows.num_layers):
            pages = self._layers[rows.layer_start + i]
            new_scales = None if scales is None else scales[i]
            if rows.num_heads == pages.num_kv_heads:
                kv_unpack(landing[i], new_scales, pages, slots)
            else:
                _unpack_heads(landing[i], new_scales, pages, slots, rows.head_start)
        self._wait()
        return True

    def _slots(self, blocks: Sequence[int], rows: RowsPlace) -> Tensor:
        """[n] int64."""
        size = self._block_size
        positions = torch.arange(rows.token_start, rows.token_start + rows.num_tokens)
        slots = torch.tensor(blocks)[positions // size] * size + positions % size
        return slots.to(self._device)

    def _empty(
        self, rows: RowsPlace, num_heads: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        heads = (rows.num_layers, 2, rows.num_tokens, num_heads)
        head_dim = self._layers[0].head_dim
        data = torch.empty((*heads, head_dim), dtype=dtype, device=self._device)
        quantized = dtype in QUANTIZED_DTYPES
        return data, torch.empty(heads, device=self._device) if quantized else None

    def _host_memory(self, num_bytes: int) -> Tensor:
        if len(self._staging) < num_bytes:
            self._staging_tensor = torch.empty(
                num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
            )
            self._staging = self._staging_tensor.numpy()
        return self._staging_tensor

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _unpack_heads(
    data: Tensor, scales: Tensor | None, pages: KvPages, slots: Tensor, head_start: int
) -> None:
    """data [2, n, heads, head_dim] to some of the pages' heads: by way of pages of n slots."""
    num_rows, num_heads = data.shape[1:3]
    heads = slice(head_start, head_start + num_heads)
    rows = [pages.k.new_empty(data.shape[1:]) for _ in range(2)]
    row_scales = [
        None if of_page is None else of_page.new_empty((num_rows, num_heads))
        for of_page in (pages.k_scale, pages.v_scale)
    ]
    converted = KvPages(rows[0], rows[1], row_scales[0], row_scales[1])
    kv_unpack(data, scales, converted, torch.arange(num_rows, device=slots.device))
    plain(pages.k)[slots, heads] = plain(converted.k)
    plain(pages.v)[slots, heads] = plain(converted.v)
    if pages.k_scale is not None and pages.v_scale is not None:
        assert converted.k_scale is not None
        assert converted.v_scale is not None
        pages.k_scale[slots, heads] = converted.k_scale
        pages.v_scale[slots, heads] = converted.v_scale
