"""ray_head: a Ray cluster as an operator starts it, for services that join one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "0123456789abcdef" * 4
# `ray`, which tells its cluster another version.
OTHER_VERSION = """
import platform
import ray._private.utils as utils
utils.compute_version_info = lambda: ("{version}", platform.python_version())
from ray.scripts.scripts import main
main()
"""


@contextmanager
def ray_head(tmp_path: Path, *, token: bool = False, version: str = "") -> Iterator[str]:
    """A Ray cluster of one node with one CPU, as an operator starts it; says it is of `version`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--head", "--port", str(port), "--num-cpus", "1", "--include-dashboard", "false"]
    temp = tempfile.mkdtemp(prefix="lt-")  # short: Ray puts sockets there
    auth = (
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        if token
        else {"RAY_AUTH_MODE": "disabled"}
    )
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": temp, **auth}
    env["RAY_worker_niceness"] = "0"  # as in a Ray of our own
    ray = [str(Path(sys.executable).parent / "ray")]
    if version:
        ray = [sys.executable, "-c", OTHER_VERSION.format(version=version)]
    with (tmp_path / "ray.log").open("w") as log:
        head = subprocess.Popen(
            [*ray, "start", *words, "--block"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
        )
    try:
        deadline_s = time.monotonic() + 60
        while "ray start --address" not in (tmp_path / "ray.log").read_text():
            assert time.monotonic() < deadline_s, (tmp_path / "ray.log").read_text()
            assert head.poll() is None, (tmp_path / "ray.log").read_text()
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(60)
        shutil.rmtree(temp, ignore_errors=True)
