"""Links: KV on its way from prefill to decode workers, one transfer after the other on each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.plan.simulation.measures import Measures


class Link:
    """Of one worker. `busy_s`: of the time that is measured."""

    def __init__(self) -> None:
        self.free_at_s = 0.0
        self.busy_s = 0.0


class Links:
    """All have the same rate. A transfer needs the sender's and the receiver's at once: it waits
    until both are free, and those behind it wait for it.
    """

    def __init__(self, bytes_per_s: float, measures: Measures) -> None:
        self._bytes_per_s = bytes_per_s
        self._measures = measures
        self.num_bytes = 0.0  # of the time that is measured

    def carry(self, sender: Link, receiver: Link, num_bytes: int, alone_until_s: float) -> float:
        """When the last byte is there. `alone_until_s`: when it would be with nothing in its way;
        the bytes before it leave while the prompt is still computed.
        """
        seconds = num_bytes / self._bytes_per_s
        begins_s = max(alone_until_s - seconds, sender.free_at_s, receiver.free_at_s)
        ends_s = begins_s + seconds
        measured_s = self._measures.measured_s(begins_s, ends_s)
        for link in (sender, receiver):
            link.free_at_s = ends_s
            link.busy_s += measured_s
        self.num_bytes += measured_s * self._bytes_per_s
        return ends_s
