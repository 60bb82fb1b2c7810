"""fingerprint: a digest that tells two models apart, cheap enough to take at every start."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from legato.worker.models.config import ModelConfig
    from legato.worker.weights.stored_tensor import StoredTensor

# Up to here every byte counts: BLAKE2b reads about 1.4 GB/s, so at most 0.8 s.
MAX_BYTES_READ_WHOLE = 1 << 30
# Above it, this many pages of every tensor: 50 MB of a 70B model.
PAGES_PER_TENSOR = 16
PAGE_BYTES = 4096
PIECE_BYTES = 4 << 20  # of a mapping in memory at a time


def fingerprint(
    config: ModelConfig,
    tensors: Iterable[StoredTensor],
    quantization: dict[str, object] | None = None,
    *,
    max_bytes_read_whole: int = MAX_BYTES_READ_WHOLE,
) -> str:
    """Hex digest of the config, of each tensor's name, dtype, shape and stored bytes, and of what
    the config says about the quantisation of the weights.

    Tensors are taken in the order of their names, so that sharding and file names do not matter.
    Where they take more than `max_bytes_read_whole` together, a tensor larger than 64 KiB is
    represented by 16 pages of 4 KiB at evenly spaced offsets, the first and the last included:
    training or quantising anew changes these; a single edited weight of a huge model may not.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    whole = sum(tensor.num_bytes for tensor in ordered) <= max_bytes_read_whole
    digest = hashlib.blake2b(digest_size=16)
    digest.update(_line(dataclasses.asdict(config)))
    if quantization is not None:
        digest.update(_line(quantization))
    views: dict[Path, mmap.mmap] = {}
    try:
        for tensor in ordered:
            digest.update(_line([tensor.name, tensor.dtype, tensor.shape]))
            if not tensor.num_bytes:
                continue
            if tensor.file not in views:
                with tensor.file.open("rb") as file:
                    views[tensor.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with memoryview(views[tensor.file]) as view:
                for start, stop in _ranges(tensor, whole=whole):
                    for piece in range(start, stop, PIECE_BYTES):
                        digest.update(view[piece : min(piece + PIECE_BYTES, stop)])
                        _forget_pages(views[tensor.file])
    finally:
        for mapped in views.values():
            mapped.close()
    return digest.hexdigest()


def _forget_pages(mapped: mmap.mmap) -> None:
    """The weights are in memory already when a worker asks for this: not twice."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def _line(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"


def _ranges(tensor: StoredTensor, *, whole: bool) -> Iterator[tuple[int, int]]:
    if whole or tensor.num_bytes <= PAGES_PER_TENSOR * PAGE_BYTES:
        yield tensor.start, tensor.stop
        return
    last = tensor.num_bytes - PAGE_BYTES
    for page in range(PAGES_PER_TENSOR):
        start = tensor.start + last * page // (PAGES_PER_TENSOR - 1)
        yield start, start + PAGE_BYTES
