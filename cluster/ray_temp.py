"""RayTemp: the folder and the environment of a Ray of our own, and their removal."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from legato.cluster import janitor

_PREFIX = "legato-"
# Ray and we add up to 90 characters for its sockets, whose paths may have 107 bytes at most.
_MAX_PARENT_LENGTH = 12
_JANITOR_TIMEOUT_S = 30.0
HEAD_PATIENCE_S = 10 * 24 * 3600  # Ray counts in milliseconds, in 31 bits


def parent_folder() -> Path:
    """TMPDIR where it is short enough for Unix sockets, else /tmp."""
    folder = Path(tempfile.gettempdir())
    return folder if len(str(folder)) <= _MAX_PARENT_LENGTH else Path("/tmp")


class RayTemp:
    """A temporary folder that is removed even where its owner is killed. Made before Ray starts.

    Every process started later carries the folder's mark in its environment; see `janitor`.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent or parent_folder()))
        self._janitor = subprocess.Popen(
            [sys.executable, "-S", "-E", janitor.__file__, str(self.path), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
            cwd="/",
        )
        os.environ[janitor.MARK] = str(self.path)

    @property
    def ray_folder(self) -> Path:
        """For Ray itself, which opens it to everybody; the folder around it is ours alone."""
        return self.path / "r"

    def remove(self) -> None:
        """Removes the folder, and whatever has not ended yet; returns when that is done."""
        os.environ.pop(janitor.MARK, None)
        # First what is quick: a janitor that finds nothing to do ends at once.
        shutil.rmtree(self.path, ignore_errors=True)
        self._janitor.communicate(timeout=_JANITOR_TIMEOUT_S)


def prepare_environment(*, own_ray: bool) -> None:
    """Must run before `ray` is imported: Ray reads these once."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Without its head all of Ray would end after a minute, and running streams with it.
    if own_ray:
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(HEAD_PATIENCE_S))
        # Ray's own 15 lets any other program take nearly all of a CPU from routers and workers.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # By this switch, off on systems where Ray has no clusters, its processes listen on loopback
        # alone. Without it Ray puts the machine's own address in the place of the one it is told.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # A token that is new each time and stays in this process and its children, instead of the one
    # in the home folder that Ray would share among all clusters.
    if own_ray and not any(name.startswith("RAY_AUTH_") for name in os.environ):
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
