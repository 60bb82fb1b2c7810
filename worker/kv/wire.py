"""The wire layout of KV: rows of one layer to bytes and back, independent of blocks.

A chunk of n tokens is [2 (K, V), n, num_kv_heads, head_dim] in the pages' dtype, C order; where
that has 8 bits, the scales [2, n, num_kv_heads] in float32 follow.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import google_crc32c
import torch

from legato.kernels.kv_pack import kv_pack, kv_unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from legato.worker.kv.cache import KvCache, KvShape

# A message stays far below every limit on the way, and one chunk is under a millisecond's work.
MAX_CHUNK_BYTES = 1 << 20

if sys.byteorder != "little":
    raise ImportError("the KV wire layout is little-endian; this machine is not")


def row_bytes(shape: KvShape) -> int:
    """K and V of one token in one layer, scales included."""
    return shape.bytes_per_row


def tokens_per_chunk(shape: KvShape) -> int:
    """Most tokens that fit into one chunk."""
    return max(1, MAX_CHUNK_BYTES // row_bytes(shape))


def slots_of(blocks: Sequence[int], block_size: int, start: int, num_tokens: int) -> Tensor:
    """Slots of tokens `start : start + num_tokens` of the owner of `blocks`: [n] int64."""
    positions = torch.arange(start, start + num_tokens)
    return torch.tensor(blocks)[positions // block_size] * block_size + positions % block_size


def checksum(data: bytes) -> int:
    """CRC32C."""
    return int(google_crc32c.value(data))


def read_rows(cache: KvCache, layer: int, slots: Tensor) -> bytes:
    """n tokens of one layer as bytes. Waits for the device."""
    rows, scales = kv_pack(cache.layers[layer], slots.to(cache.layers[layer].k.device))
    return _bytes_of(rows) + (b"" if scales is None else _bytes_of(scales))


def write_rows(cache: KvCache, layer: int, slots: Tensor, data: bytes) -> None:
    """The inverse of `read_rows`; when it returns, every thread and stream sees the rows."""
    shape = cache.shape
    device = cache.layers[layer].k.device
    buffer = bytearray(data)
    heads = (2, len(slots), shape.num_kv_heads)
    count = math.prod(heads) * shape.head_dim
    rows = torch.frombuffer(buffer, dtype=shape.dtype, count=count)
    scales = None
    if shape.quantized:
        offset = count * shape.dtype.itemsize
        scales = torch.frombuffer(buffer, dtype=torch.float32, offset=offset)
        scales = scales.view(heads).to(device)
    rows = rows.view(*heads, shape.head_dim).to(device)
    kv_unpack(rows, scales, cache.layers[layer], slots.to(device))
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().view(torch.uint8).numpy().tobytes()
