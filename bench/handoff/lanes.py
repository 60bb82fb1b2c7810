"""LaneSender: the product's sender, made to use one lane, and its transport's constants."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from legato.worker.handoff import sender
from legato.worker.handoff.sender import KvSender
from legato.worker.kv import wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from legato.protos import worker_pb2
    from legato.worker.kv.block_lease import BlockLease
    from legato.worker.node import WorkerNode

LANES = ("grpc",)


class LaneSender:
    """Sends the rows of a computed sequence by the lane given, and by no other."""

    def __init__(self, node: WorkerNode, lane: str) -> None:
        assert lane in LANES
        self._sender = KvSender(node.identity, node.pager, node.peers, node.transfers)

    async def send(
        self, lease: BlockLease, num_tokens: int, ticket: worker_pb2.KvTicket, address: str
    ) -> int:
        """Returns the bytes when the receiver has committed; raises HandoffError."""
        result = await self._sender.send(lease, num_tokens, ticket, address)
        return result.kv_bytes

    async def close(self) -> None:
        """The node closes the connections."""


def chunk_bytes() -> int:
    """What a chunk has at most."""
    return wire.MAX_CHUNK_BYTES


def window_bytes() -> int:
    """What may be unanswered."""
    return sender.WINDOW_BYTES


@contextmanager
def transport(chunk: int, window: int) -> Iterator[None]:
    """Senders made within have these constants instead of the product's."""
    before = wire.MAX_CHUNK_BYTES, sender.WINDOW_BYTES
    wire.MAX_CHUNK_BYTES, sender.WINDOW_BYTES = chunk, window
    try:
        yield
    finally:
        wire.MAX_CHUNK_BYTES, sender.WINDOW_BYTES = before
