"""The connections of a client: one channel a router, and how soon a dead one is noticed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

C = TypeVar("C")
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # as all of our commands do: a service is near
    # A router that is stopped or cut off is noticed within 3 s while a call is open.
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),  # what a silent peer is given: a minute by default
    ("grpc.http2.max_pings_without_data", 0),
    # Also the time that a connection may take to be made: 20 s by default.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", -1),  # the reply to a prompt with many logprobs is large
)


class Channels(Generic[C]):
    """By address, made when first asked for, kept to the end. Thread-safe."""

    def __init__(self, connect: Callable[[str], C]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._by_target: dict[str, C] = {}
        self.closed = False

    def of(self, target: str) -> C:
        """Its channel.

        Raises:
            ValueError: the client is closed.
        """
        with self._lock:
            if self.closed:
                raise ValueError("the client is closed")
            if target not in self._by_target:
                self._by_target[target] = self._connect(target)
            return self._by_target[target]

    def close(self) -> list[C]:
        """Those that are to be closed; no others will be made."""
        with self._lock:
            self.closed = True
            channels = list(self._by_target.values())
            self._by_target.clear()
            return channels
