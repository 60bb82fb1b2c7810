"""LaneSender: the product's sender, made to use one lane, and its transport's constants."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from legato.worker.handoff import lanes, link_session
from legato.worker.handoff.sender import KvSender
from legato.worker.handoff.shared_memory import SenderMemory
from legato.worker.handoff.transfer_counters import TransferCounters
from legato.worker.kv.progress import KvProgress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from legato.protos import worker_pb2
    from legato.worker.kv.block_lease import BlockLease
    from legato.worker.node import WorkerNode

LANES = ("grpc", "shared_memory")


class LaneSender:
    """Sends the rows of computed sequences by the lane given, and by no other."""

    def __init__(self, node: WorkerNode, lane: str) -> None:
        assert lane in LANES
        self._lane = lane
        self._num_layers = node.identity.kv_shape.num_layers
        self._counters = TransferCounters()
        self._sender = KvSender(
            node.identity,
            node.pager,
            node.pager.wire,
            self._counters,
            SenderMemory.create if lane == "shared_memory" else None,
        )

    async def send(
        self, lease: BlockLease, num_tokens: int, ticket: worker_pb2.KvTicket, address: str
    ) -> int:
        """Returns the bytes when the receiver has committed.

        Raises:
            HandoffError: it has not.
            RuntimeError: rows went by the other lane.
        """
        progress = KvProgress.complete(lease, self._num_layers, num_tokens)
        result = await self._sender.send(progress, ticket, address)
        counters = self._counters
        by_grpc = self._lane == "grpc"
        if counters.bytes_by_memory if by_grpc else counters.bytes_by_grpc:
            raise RuntimeError(f"rows went by another lane than {self._lane}: see the log")
        return result.kv_bytes

    async def close(self) -> None:
        """Ends its link."""
        await self._sender.close()


def chunk_bytes(lane: str) -> int:
    """What a chunk has at most."""
    return lanes.CHUNK_BYTES if lane == "grpc" else lanes.SLOT_BYTES


def window_bytes(lane: str) -> int:
    """What may be unanswered."""
    return lanes.WINDOW_BYTES if lane == "grpc" else lanes.NUM_SLOTS * lanes.SLOT_BYTES


@contextmanager
def transport(chunk: int, window: int) -> Iterator[None]:
    """Senders made within have these constants on both lanes instead of the product's."""
    names = ("CHUNK_BYTES", "WINDOW_BYTES", "WINDOW_CHUNKS", "SLOT_BYTES", "NUM_SLOTS")
    before = [getattr(lanes, name) for name in names]
    num_chunks = max(1, window // chunk)
    # One more, so that bytes alone bound it.
    for name, value in zip(names, (chunk, window, num_chunks + 1, chunk, num_chunks), strict=True):
        setattr(lanes, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(lanes, name, value)


def receive_window(window: int) -> None:
    """Links that this process receives by have so many bytes in hand at most, from now on."""
    link_session.MAX_BYTES_IN_HAND = window
    link_session.MAX_FRAMES_IN_HAND = 1 << 16  # bytes alone bound it
