"""KvPager: moves rows between the wire and the pages, on a thread of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from legato.worker.kv import wire

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from legato.worker.kv.block_lease import BlockLease
    from legato.worker.kv.cache import KvCache


class DamagedChunkError(Exception):
    """The bytes are not those that the checksum was made of."""


class KvPager:
    """Each move pins the lease in the pager's thread, for as long as it touches the pages: a lease
    released before the thread gets to it raises LeaseReleasedError there and nothing is touched.

    A thread, because the event loop must not wait for a megabyte's copy, let alone for a device
    that is busy with a prefill; one is enough, since a move takes well under a millisecond.
    """

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="legato-kv")
        device = cache.layers[0].k.device
        # A stream of its own, so that a copy need not queue behind the engine's kernels. The rows
        # to send are finished: their first token has been sampled, which waited for them.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch has no type for it

    async def read(
        self, lease: BlockLease, layer: int, token_start: int, num_tokens: int
    ) -> tuple[bytes, int]:
        """The rows as wire bytes, and their checksum; raises LeaseReleasedError."""

        def move() -> tuple[bytes, int]:
            with lease.pinned() as blocks, self._on_stream(), torch.inference_mode():
                size = self._cache.shape.block_size
                slots = wire.slots_of(blocks, size, token_start, num_tokens)
                data = wire.read_rows(self._cache, layer, slots)
            return data, wire.checksum(data)

        return await asyncio.get_running_loop().run_in_executor(self._executor, move)

    async def write(
        self,
        lease: BlockLease,
        layer: int,
        token_start: int,
        num_tokens: int,
        data: bytes,
        crc: int,
    ) -> None:
        """Lands wire bytes in the pages.

        Raises:
            DamagedChunkError: the checksum is wrong; nothing was written.
            LeaseReleasedError: the request is over; nothing was written.
        """

        def move() -> None:
            if wire.checksum(data) != crc:
                raise DamagedChunkError
            with lease.pinned() as blocks, self._on_stream(), torch.inference_mode():
                size = self._cache.shape.block_size
                slots = wire.slots_of(blocks, size, token_start, num_tokens)
                wire.write_rows(self._cache, layer, slots, data)

        await asyncio.get_running_loop().run_in_executor(self._executor, move)

    def close(self) -> None:
        """Drops what has not begun. Does not wait: a move ends by itself within a moment."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
