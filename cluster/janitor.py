"""The janitor: a small process that cleans up after an owner that was killed before it could.

It waits for the end of its standard input, whose other end only the owner holds, so that the
kernel tells it of that end whatever the cause. Then it ends the processes that carry the owner's
mark in their environment or write into the owner's temporary folder, and removes the folder.

The kernel itself ends most of Ray's processes with their owner, but two of Ray's agents were seen
to live on for 64 s: they wait for a head that is gone. Run as a file, with the standard library
alone, so that it starts at once and weighs little.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import time
from pathlib import Path

MARK = "LEGATO_RAY_TEMP"
GRACE_S = 2.0  # for the processes to end by themselves
BOUND_S = 20.0
POLL_S = 0.1


def marked_processes(mark: bytes, proc: Path = Path("/proc")) -> list[int]:
    """Pids, but for our own, of this user's processes whose environment holds `mark`."""
    found = []
    for folder in proc.iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has just ended, or belongs to somebody else
    return found


def writing_processes(folder: Path, proc: Path = Path("/proc")) -> list[int]:
    """Pids, but for our own, of this user's processes that have a file in `folder` open to write.

    Ray's agents name themselves, and the room for the name is taken from their environment: how
    much of it is left to read, the mark or not, depends on how long it was.
    """
    inside = f"{folder}/"
    found = []
    for process in proc.iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            for file in (process / "fd").iterdir():
                writes = file.lstat().st_mode & stat.S_IWUSR
                if writes and os.readlink(file).startswith(inside):
                    found.append(int(process.name))
                    break
        except OSError:
            continue  # as above
    return found


def clean_up(folder: Path, owner_pid: int = 0) -> None:
    """Ends what carries the mark of `folder` or writes into it, but never the owner, which ends by
    itself; removes the folder; gives up after BOUND_S."""
    mark = f"{MARK}={folder}".encode()
    started_s = time.monotonic()
    while time.monotonic() - started_s < BOUND_S:
        pids = {*marked_processes(mark), *writing_processes(folder)} - {owner_pid}
        if not pids:
            break
        if time.monotonic() - started_s > GRACE_S:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    clean_up(Path(sys.argv[1]), int(sys.argv[2]))
