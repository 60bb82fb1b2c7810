"""pinned: a running service whose decode worker has a core that it shares with nobody."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def pin(process_id: int, cores: set[int]) -> None:
    """All threads of a process, and those they begin later; nothing where it is gone. As
    `taskset -acp CORES PID` does.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{process_id}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), cores)


@contextmanager
def pinned(alone: Sequence[int], others: Sequence[int]) -> Iterator[None]:
    """The processes `alone` on the last core that this process may use; `others` and this process,
    where the clients are, on the rest. This process gets its cores back in the end.

    Raises:
        ValueError: there is one core only.
    """
    cores = os.sched_getaffinity(0)
    last = {max(cores)}
    if cores == last:
        raise ValueError("there is one core only: nothing can be pinned apart")
    for process_id in (*others, os.getpid()):
        if process_id not in alone:
            pin(process_id, cores - last)
    for process_id in alone:
        pin(process_id, last)
    try:
        yield
    finally:
        pin(os.getpid(), cores)
