"""TransferCounters: what a worker has sent and received, for its load report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TransferCounters:
    """Since the process started, but for `sending`, which is a gauge. Of the event loop."""

    sending: int = 0
    bytes_by_grpc: int = 0  # sent; what was sent again counts again
    bytes_by_memory: int = 0  # as above
    bytes_received: int = 0
    completed: int = 0
    failed: int = 0
    chunks_refused: int = 0
    chunks_resent: int = 0  # they had arrived damaged
    resumed: int = 0  # how often a transfer went on over a new link

    @property
    def bytes_sent(self) -> int:
        """By either lane."""
        return self.bytes_by_grpc + self.bytes_by_memory
