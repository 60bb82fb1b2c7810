"""limited: the bound of a call that came without a deadline."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc

from legato.worker.services.errors import CallError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# What the router gives a request that has no deadline. The router's own calls carry theirs.
CALL_LIMIT_S = 600.0


@asynccontextmanager
async def limited(
    context: grpc.aio.ServicerContext[Any, Any],
) -> AsyncIterator[None]:
    """Around a call that holds blocks: without this, one that says nothing more holds for ever."""
    if context.time_remaining() is not None:
        yield  # gRPC ends the call at its deadline
        return
    limit_s = CALL_LIMIT_S
    bound = asyncio.timeout(limit_s)
    try:
        async with bound:
            yield
    except TimeoutError:
        if not bound.expired():
            raise
        raise CallError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"the call is not over after {limit_s:g} s, the limit of calls without a deadline",
        ) from None
