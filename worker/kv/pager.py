"""KvPager: moves rows between the wire and the pages, on a thread of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch

from legato.kernels.kv_rows import PagedRows

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from legato.worker.kv.block_lease import BlockLease
    from legato.worker.kv.cache import KvCache
    from legato.worker.kv.row_range import RowRange
    from legato.worker.kv.wire import WireFormat

T = TypeVar("T")


class DamagedChunkError(Exception):
    """The bytes are not those that the checksum was made of."""


class KvPager:
    """Each move pins the lease in the pager's thread, for as long as it touches the pages: a lease
    released before the thread gets to it raises LeaseReleasedError there and nothing is touched.

    A thread, because the event loop must not wait for a megabyte's copy, let alone for a device
    that is busy with a prefill; one is enough, since a move takes well under a millisecond. Moves
    are made in the order in which they were asked for.

    A cancelled move that has begun is waited for: after `read` or `write` nobody touches the
    caller's buffer any more.
    """

    def __init__(self, cache: KvCache, wire: WireFormat) -> None:
        self.wire = wire
        self._rows = PagedRows(cache.layers, cache.shape.block_size)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="legato-kv")
        device = cache.layers[0].k.device
        # A stream of its own, so that a copy need not queue behind the engine's kernels.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch has no type for it

    async def read(
        self,
        lease: BlockLease,
        rows: RowRange,
        into: memoryview,
        seed: int,
        after: object | None = None,
    ) -> int:
        """Fills `into`, of exactly `wire.num_bytes(rows)` bytes, and returns its CRC32C, extended
        from `seed`.

        Args:
            after: a torch.cuda.Event behind which the rows are there; None: they are.

        Raises:
            LeaseReleasedError: the request is over.
            ValueError: the rows are not those of the pages or the lease, or `into` does not fit.
        """
        self._check_size(rows, into)

        def move() -> int:
            with lease.pinned() as blocks, self._on_stream(), torch.inference_mode():
                if after is not None:
                    assert isinstance(after, torch.cuda.Event)
                    assert self._stream is not None
                    self._stream.wait_event(after)
                return self._rows.read(blocks, rows, self.wire.dtype, into, seed)

        return await self._run(move)

    async def write(
        self, lease: BlockLease, rows: RowRange, data: memoryview, seed: int, crc: int
    ) -> None:
        """Lands `data` in the pages, and checks whether its CRC32C, extended from `seed`, is `crc`.

        The bytes that land are those that were checked, even where `data` is memory that another
        process writes meanwhile.

        Raises:
            DamagedChunkError: the checksum is wrong; these rows hold anything now.
            LeaseReleasedError: the request is over; nothing was written.
            ValueError: as of `read`; nothing was written.
        """
        self._check_size(rows, data)

        def move() -> None:
            with lease.pinned() as blocks, self._on_stream(), torch.inference_mode():
                if not self._rows.write(blocks, rows, self.wire.dtype, data, seed, crc):
                    raise DamagedChunkError

        await self._run(move)

    def close(self) -> None:
        """Drops what has not begun. Does not wait: a move ends by itself within a moment."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self, move: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def tell(_: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_end, ended)

        moving = self._executor.submit(move)
        moving.add_done_callback(tell)
        try:
            # Not `wrap_future` and `shield`, which take three turns of the loop more.
            await ended
        except asyncio.CancelledError:
            if not moving.cancel():
                await _ended(asyncio.wrap_future(moving))
            raise
        return moving.result()

    def _check_size(self, rows: RowRange, buffer: memoryview) -> None:
        expected = self.wire.num_bytes(rows)
        if buffer.nbytes != expected:
            raise ValueError(f"the buffer has {buffer.nbytes} bytes, the rows have {expected}")

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _end(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


async def _ended(waiting: asyncio.Future[T]) -> None:
    """Returns when it is done, however often the task is cancelled meanwhile; never raises."""
    while not waiting.done():
        try:
            await asyncio.wait((waiting,))
        except asyncio.CancelledError:
            continue  # the caller raises the first one
    if not waiting.cancelled():
        waiting.exception()  # was seen
