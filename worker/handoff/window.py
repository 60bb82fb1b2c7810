"""Window: how many bytes of rows may be on the way to a receiver, by what the path moves."""

from __future__ import annotations

# What is on the way takes so long to arrive. gRPC's pings and the link's beats queue behind it, and
# after 2 s of silence the path is taken for dead. Processes that wait for a core are within it.
TARGET_S = 0.5
# Where nothing is known yet, and on the slowest of paths: at 100 kB/s, 1.3 s.
LEAST_BYTES = 128 << 10
# In one round trip, that is: from LEAST_BYTES to 6 MiB in three.
_MOST_GROWTH = 4
_MOST_SHRINKAGE = 2


class Window:
    """Starts small, and follows the rate at which the receiver answers: the bytes that were on the
    way when a frame was sent, over the time until it was answered. That is never more than what the
    path moves, and about that where the window is full. Bytes that are buffered anywhere between
    count, for they are unanswered.
    """

    def __init__(self, most_bytes: int) -> None:
        self.num_bytes = min(LEAST_BYTES, most_bytes)
        self._most_bytes = most_bytes
        self._changed_at_s = float("-inf")

    def answered(self, bytes_on_way: int, sent_at_s: float, now_s: float) -> None:
        """A frame that was sent at `sent_at_s`; `bytes_on_way`: then, its own included."""
        if sent_at_s < self._changed_at_s:  # that change is not to be seen in it
            return
        took_s = max(now_s - sent_at_s, 1e-6)
        wanted = int(bytes_on_way / took_s * TARGET_S)
        if took_s > TARGET_S:
            least = max(self.num_bytes // _MOST_SHRINKAGE, LEAST_BYTES)
            new = min(max(wanted, least), self.num_bytes)
        else:
            most = min(self.num_bytes * _MOST_GROWTH, self._most_bytes)
            new = max(min(wanted, most), self.num_bytes)
        if new != self.num_bytes:
            self.num_bytes = new
            self._changed_at_s = now_s
