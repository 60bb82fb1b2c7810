"""EventStream: takes server-sent events apart."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 << 20


class EventStream:
    """Fed with what comes from the connection, however it is cut."""

    def __init__(self) -> None:
        self._rest = b""  # of a line that has not ended
        self._data: list[bytes] = []  # of an event that has not ended
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that has ended; other fields and comments are left out.

        Raises:
            ValueError: an event is longer than MAX_EVENT_BYTES.
        """
        events: list[bytes] = []
        *lines, self._rest = (self._rest + data).split(b"\n")
        for ended in lines:
            line = ended.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(line)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data, self._size = [], 0
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event has more than {MAX_EVENT_BYTES:,} bytes")
        return events
