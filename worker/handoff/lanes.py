"""The two ways of rows to the receiver: inside gRPC's messages, or through shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from legato.protos.kv_transfer_pb2 import KvFrame
from legato.worker.handoff.frames import RowsPrefix
from legato.worker.handoff.message_buffer import message_buffer
from legato.worker.handoff.shared_memory import release
from legato.worker.handoff.window import Window

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from legato.protos.kv_transfer_pb2 import KvRows
    from legato.worker.handoff.shared_memory import SenderMemory
    from legato.worker.handoff.transfer_counters import TransferCounters

    # Fills the view and returns the CRC32C of its bytes, extending the seed.
    Fill = Callable[[memoryview, int], Awaitable[int]]


# Rows of one message: at 4 MiB the C library would map each anew (page faults on both sides, half
# the rate); below 2 MiB the work for each message counts.
CHUNK_BYTES = 2 << 20
# Of all that are made and not answered, at most (see Window); the receiver holds no more. With what
# gRPC copies, 8 MiB and more would be given back to the system and taken again, page by page.
WINDOW_BYTES = 6 << 20
# However small they are.
WINDOW_CHUNKS = 16
# Shared memory, which is all that the rows take, on both sides. A frame costs each side 0.2 ms
# beside its copy, which takes 0.06 ms a MiB: 1 MiB slots came to less than half the rate.
SLOT_BYTES = 8 << 20
NUM_SLOTS = 4


@dataclass(frozen=True)
class Packed:
    """Rows in a message, which is none of this: gRPC needs it no longer than the write lasts."""

    num_bytes: int  # of the rows
    slot: int | None = None  # in use until the receiver has answered


class Lane(Protocol):
    """Of one link."""

    @property
    def chunk_bytes(self) -> int:
        """What the rows of a frame have at most."""

    @property
    def window_bytes(self) -> int:
        """What the rows that are packed and not free have at most, one frame excepted."""

    @property
    def window_chunks(self) -> int:
        """So many frames are packed and not free at most."""

    async def pack(self, header: KvRows, num_bytes: int, fill: Fill) -> tuple[bytes, Packed]:
        """An encoded KvFrame with the rows that `fill` gives; raises what it raises, and holds
        nothing then. `header` has neither `crc32c` nor rows. The caller keeps the bounds.
        """

    def free(self, packed: Packed) -> None:
        """It was answered, or will never be sent."""

    def answered(self, bytes_on_way: int, sent_at_s: float, now_s: float) -> None:
        """A frame that was sent: see `Window.answered`."""

    def count(self, packed: Packed, counters: TransferCounters) -> None:
        """It was sent."""


class GrpcLane:
    """Rows are read straight into the one bytes object that gRPC takes."""

    def __init__(self, row_bytes: int) -> None:
        self.window_chunks = WINDOW_CHUNKS
        self._row_bytes = row_bytes
        self._window = Window(WINDOW_BYTES)

    @property
    def chunk_bytes(self) -> int:
        """While one is on its way, there is room for another one."""
        return max(min(CHUNK_BYTES, self._window.num_bytes // 2), self._row_bytes)

    @property
    def window_bytes(self) -> int:
        """See `Lane.window_bytes`."""
        return self._window.num_bytes

    async def pack(self, header: KvRows, num_bytes: int, fill: Fill) -> tuple[bytes, Packed]:
        """See `Lane.pack`."""
        prefix = RowsPrefix.of(header, num_bytes)
        message, view = message_buffer(prefix.num_bytes)
        crc = await fill(view[len(prefix.head) :], header.header_crc32c)
        prefix.write(view, crc)
        return message, Packed(num_bytes)

    def free(self, packed: Packed) -> None:
        """Nothing is held."""

    def answered(self, bytes_on_way: int, sent_at_s: float, now_s: float) -> None:
        """See `Lane.answered`."""
        self._window.answered(bytes_on_way, sent_at_s, now_s)

    def count(self, packed: Packed, counters: TransferCounters) -> None:
        """See `Lane.count`."""
        counters.bytes_by_grpc += packed.num_bytes


class MemoryLane:
    """Rows are read into a slot; the message names it. The slot that was used last is used next:
    its bytes are in the caches, and memory is touched only as far as it is needed.
    """

    def __init__(self, memory: SenderMemory) -> None:
        self._memory = memory
        self.chunk_bytes = memory.description.slot_bytes
        self.window_chunks = memory.description.num_slots
        self.window_bytes = self.window_chunks * self.chunk_bytes
        self._free = list(range(self.window_chunks))[::-1]

    async def pack(self, header: KvRows, num_bytes: int, fill: Fill) -> tuple[bytes, Packed]:
        """See `Lane.pack`."""
        slot = self._free.pop()
        view = self._memory.slot(slot)[:num_bytes]
        try:
            crc = await fill(view, header.header_crc32c)
        except BaseException:
            self._free.append(slot)
            raise
        finally:
            release(view)
        header.crc32c, header.slot = crc, slot
        return KvFrame(rows=header).SerializeToString(), Packed(num_bytes, slot)

    def free(self, packed: Packed) -> None:
        """See `Lane.free`."""
        assert packed.slot is not None
        self._free.append(packed.slot)

    def answered(self, bytes_on_way: int, sent_at_s: float, now_s: float) -> None:
        """Rows are not on the way: the slots are the bound."""

    def count(self, packed: Packed, counters: TransferCounters) -> None:
        """See `Lane.count`."""
        counters.bytes_by_memory += packed.num_bytes
