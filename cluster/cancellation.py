"""Whether this task is being cancelled: gRPC's answer alone does not tell."""

from __future__ import annotations

import asyncio


def own_cancellation() -> bool:
    """Whether a CancelledError means this task, and not the gRPC call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def check_cancellation() -> None:
    """To be called after waiting for gRPC, before anything is tried again.

    Where a call ends in the moment in which who waits for it is cancelled, gRPC may tell of the
    end alone.

    Raises:
        CancelledError: this task is being cancelled.
    """
    if own_cancellation():
        raise asyncio.CancelledError
