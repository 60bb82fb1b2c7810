"""Cancellation: whether this task is being cancelled, and what is seen through all the same."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any


def check_cancellation() -> None:
    """To be called after waiting for gRPC, whose answer alone does not tell, before anything is
    tried again.

    A CancelledError there means the task or only the call; and where a call ends in the moment in
    which who waits for it is cancelled, gRPC may tell of the end alone.

    Raises:
        CancelledError: this task is being cancelled.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def all_ended(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Returns when all are done, and not before, however often this task is cancelled: they were
    cancelled, and what they hold is theirs until they end.

    Raises:
        CancelledError: this task was cancelled meanwhile.
    """
    cancelled = False
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
