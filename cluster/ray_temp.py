"""RayTemp: the folder and the environment of a Ray of our own, and their removal."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

_PREFIX = "legato-"
_LOCK = "owner.lock"
# Ray adds up to 75 characters for its sockets, whose paths may have 107 bytes at most.
_MAX_PARENT_LENGTH = 12


def parent_folder() -> Path:
    """TMPDIR where it is short enough for Unix sockets, else /tmp."""
    folder = Path(tempfile.gettempdir())
    return folder if len(str(folder)) <= _MAX_PARENT_LENGTH else Path("/tmp")


class RayTemp:
    """Owned by one process: its lock on the folder is how others see that it lives."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or parent_folder()
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = (self.path / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Removes the folder. Ray's last processes may still write into it for a moment."""
        for _ in range(3):
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                break
        self._lock.close()


def remove_abandoned(parent: Path) -> list[Path]:
    """Removes folders whose owners were killed before they could; returns them."""
    removed = []
    for folder in parent.glob(f"{_PREFIX}*"):
        lock = folder / _LOCK
        try:
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
        except OSError:
            continue  # in use, or not ours
    return removed


def prepare_environment() -> None:
    """Must run before `ray` is imported: Ray reads these once.

    The token of our own Ray is new each time and stays in this process and its children, instead
    of the one in the home folder that Ray would share among all clusters.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if not any(name.startswith("RAY_AUTH_") for name in os.environ):
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
