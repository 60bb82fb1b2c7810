"""raise_open_files: the soft limit becomes the hard one."""

from __future__ import annotations

import subprocess
import sys


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    code = (
        "import resource as r; from legato.cluster.open_files import raise_open_files as f;"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, 200));"
        "print(f(), r.getrlimit(r.RLIMIT_NOFILE), f())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "200 (200, 200) 200\n"
