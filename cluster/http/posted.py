"""read_posted: what a client posts, read without holding up the streams of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from legato.cluster.http.request_body import read_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from legato.cluster.router import Router

# What is larger takes longer to read, where it is of many small parts, than a token may wait.
MAX_INLINE_BYTES = 1 << 16

T = TypeVar("T")


async def read_posted(router: Router, request: Request, read: Callable[[bytes], T]) -> T:
    """What `read` makes of the body: in one of the threads that read prompts, where it is large.

    Raises:
        RequestError: of the body, or too many are read already; and what `read` raises.
        ClientGoneError: the client left before the body's end.
    """
    body = await read_body(request)
    if len(body) <= MAX_INLINE_BYTES:
        return read(body)
    return await router.reader.run(read, body)
