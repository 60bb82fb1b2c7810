"""TransferCounters: what a worker has sent and received, for its load report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TransferCounters:
    """Since the process started, but for `sending`, which is a gauge. Of the event loop."""

    sending: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    completed: int = 0
    failed: int = 0
    chunks_refused: int = 0
