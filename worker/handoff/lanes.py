"""The two ways of rows to the receiver: inside gRPC's messages, or through shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from legato.protos.kv_transfer_pb2 import KvFrame, KvRows
from legato.worker.handoff.frames import RowsPrefix, header_checksum
from legato.worker.handoff.message_buffer import message_buffer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from legato.worker.handoff.shared_memory import SenderMemory
    from legato.worker.handoff.transfer_counters import TransferCounters

    # Fills the view and returns the CRC32C of its bytes, extending the seed.
    Fill = Callable[[memoryview, int], Awaitable[int]]


@dataclass(frozen=True)
class Packed:
    """A KvFrame with rows, encoded. `slot` is used until the receiver has answered it."""

    message: bytes
    num_bytes: int  # of the rows
    slot: int | None = None


class Lane(Protocol):
    """Of one link."""

    async def pack(self, header: KvRows, num_bytes: int, fill: Fill) -> Packed:
        """A frame with the rows that `fill` gives; raises what it raises, and holds nothing then.
        `header` has neither checksum nor rows. At most WINDOW_CHUNKS are packed and not free.
        """

    def free(self, packed: Packed) -> None:
        """It was answered, or will never be sent."""

    def count(self, packed: Packed, counters: TransferCounters) -> None:
        """It was sent."""


class GrpcLane:
    """Rows are read straight into the one bytes object that gRPC takes."""

    async def pack(self, header: KvRows, num_bytes: int, fill: Fill) -> Packed:
        """See `Lane.pack`."""
        prefix = RowsPrefix.of(header, num_bytes)
        message, view = message_buffer(prefix.num_bytes)
        crc = await fill(view[len(prefix.head) :], header_checksum(header))
        prefix.write(view, crc)
        return Packed(message, num_bytes)

    def free(self, packed: Packed) -> None:
        """Nothing is held."""

    def count(self, packed: Packed, counters: TransferCounters) -> None:
        """See `Lane.count`."""
        counters.bytes_by_grpc += packed.num_bytes


class MemoryLane:
    """Rows are read into a slot; the message names it. The slot that was used last is used next:
    its bytes are in the caches, and memory is touched only as far as it is needed.
    """

    def __init__(self, memory: SenderMemory, num_slots: int) -> None:
        self._memory = memory
        self._free = list(range(num_slots))[::-1]

    async def pack(self, header: KvRows, num_bytes: int, fill: Fill) -> Packed:
        """See `Lane.pack`."""
        slot = self._free.pop()
        try:
            view = self._memory.slot(slot)[:num_bytes]
            crc = await fill(view, header_checksum(header))
        except BaseException:
            self._free.append(slot)
            raise
        rows = KvRows()
        rows.CopyFrom(header)
        rows.crc32c, rows.slot = crc, slot
        return Packed(KvFrame(rows=rows).SerializeToString(), num_bytes, slot)

    def free(self, packed: Packed) -> None:
        """See `Lane.free`."""
        assert packed.slot is not None
        self._free.append(packed.slot)

    def count(self, packed: Packed, counters: TransferCounters) -> None:
        """See `Lane.count`."""
        counters.bytes_by_memory += packed.num_bytes
