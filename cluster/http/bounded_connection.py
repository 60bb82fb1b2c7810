"""bounded_connections: no more connections than a bound; idle ones make room for new ones. What is
no HTTP is answered as other errors are.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import grpc
import h11
from uvicorn.protocols.http.h11_impl import H11Protocol  # the strictest parser

from legato.cluster.error_reasons import Reason
from legato.cluster.errors import RequestError, unavailable
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
                told = f"all {most} connections of this router have requests; try again"
                header = f"retry-after: {RETRY_AFTER_S}\r\n"
                transport.write(_last_answer("503 Service Unavailable", unavailable(told), header))
                transport.close()

        def send_400_response(self, msg: str) -> None:
            """Of bytes that are no HTTP; where an answer has begun, nothing more can be said."""
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.write(_last_answer("400 Bad Request", _MALFORMED))
            self.transport.close()

    return Connection


_MALFORMED = RequestError(
    grpc.StatusCode.INVALID_ARGUMENT,
    "what came is no request of HTTP/1.1",
    reason=Reason.MALFORMED_REQUEST,
)


def _last_answer(status: str, error: RequestError, header: str = "") -> bytes:
    body = json.dumps(error_object(error)).encode()
    head = (
        f"HTTP/1.1 {status}\r\n"
        "connection: close\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{header}\r\n"
    )
    return head.encode() + body
