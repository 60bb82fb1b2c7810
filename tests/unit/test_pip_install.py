"""pip_install.py: pip's output goes into a log; shown is how far it is, or why it failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "pip_install.py"
sys.path.insert(0, str(SCRIPT.parent))

from pip_install import Steps  # noqa: E402  # it stands beside setup.py, in no package


def test_the_steps_are_told_in_words() -> None:
    steps = Steps(num_sources=12)
    shown = []
    for line in (
        "Using pip 26.0 from /x/pip (python 3.11)",
        "Collecting torch==2.13.0 (from -c constraints.txt (line 3))",
        "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (103.2 MB)",
        "Requirement already satisfied: setuptools in ./lib",
        "  building 'legato.kernels.native_avx2' extension",
        "  gcc -pthread -O3 -fPIC -I/usr/include -c kernels/csrc/attention.c -o /tmp/attention.o",
        "  gcc -pthread -O3 -fPIC -I/usr/include -c kernels/csrc/linear.c -o /tmp/linear.o",
        "  gcc -shared /tmp/attention.o /tmp/linear.o -o native_avx2.so",
        "  building 'legato.kernels.native_avx512' extension",
        "  gcc -pthread -O3 -fPIC -I/usr/include -c kernels/csrc/attention.c -o /tmp/attention.o",
        "Installing collected packages: mpmath, torch, legato",
    ):
        steps.take(line)
        if steps.text not in shown:
            shown.append(steps.text)
    assert shown == [
        "",
        "1 package looked up",
        "downloading torch (103.2 MB)",
        "2 packages looked up",
        "compiling kernels: native_avx2, file 1 of 12",
        "compiling kernels: native_avx2, file 2 of 12",
        "compiling kernels: native_avx512, file 1 of 12",
        "writing 3 packages",
    ]


def test_a_failure_shows_the_end_of_the_log_and_where_it_is(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "pip.log"
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(log), "--no-index", str(tmp_path / "no-such.whl")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr.endswith(f"[legato] pip failed; all that it said is in {log}\n")
    assert "no-such.whl" in ran.stderr
    assert "no-such.whl" in log.read_text()
