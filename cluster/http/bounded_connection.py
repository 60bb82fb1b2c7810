"""bounded_connections: no more connections than a bound; idle ones make room for new ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from uvicorn.protocols.http.h11_impl import H11Protocol  # the strictest parser

from legato.cluster.errors import unavailable
from legato.cluster.http.error_response import error_object

if TYPE_CHECKING:
    import asyncio

    from legato.cluster.http.idle_connections import IdleConnections

RETRY_AFTER_S = 1


def bounded_connections(most: int, idle: IdleConnections) -> type[H11Protocol]:
    """What uvicorn makes of a connection: where `most` are open, the longest idle one ends; where
    none is idle, the new one is answered 503 and ends, whatever it would have asked.
    """

    class Connection(H11Protocol):
        def connection_made(  # type: ignore[override]  # as the base has it
            self, transport: asyncio.Transport
        ) -> None:
            if len(self.connections) >= most:
                for other in idle.for_room(self.connections):
                    other.transport.abort()
                    self.connections.discard(other)  # its file closes within the loop's next turn
            is_refused = len(self.connections) >= most
            super().connection_made(transport)
            idle.opened(self)
            if is_refused:
                transport.write(_refusal(most))
                transport.close()

    return Connection


def _refusal(most: int) -> bytes:
    error = unavailable(f"all {most} connections of this router have requests; try again")
    body = json.dumps(error_object(error)).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\n"
        "connection: close\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        f"retry-after: {RETRY_AFTER_S}\r\n\r\n"
    )
    return head.encode() + body
