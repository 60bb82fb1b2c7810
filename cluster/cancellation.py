"""Whether this task is being cancelled: gRPC's answer alone does not tell."""

from __future__ import annotations

import asyncio


def check_cancellation() -> None:
    """To be called after waiting for gRPC, before anything is tried again.

    A CancelledError there means the task or only the call; and where a call ends in the moment in
    which who waits for it is cancelled, gRPC may tell of the end alone.

    Raises:
        CancelledError: this task is being cancelled.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
