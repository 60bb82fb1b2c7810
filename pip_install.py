"""Run pip install with its output in a log, and say in a few lines how far it is.

python pip_install.py LOG ARGUMENTS…
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

PERIOD_S = 5.0  # between two lines
NUM_LAST_LINES = 15  # of the log, where pip fails
SOURCES = Path(__file__).parent / "kernels" / "csrc"


class Steps:
    """What pip is at, as its verbose output tells it."""

    def __init__(self, num_sources: int) -> None:
        """`num_sources`: C files of each library of kernels."""
        self.text = ""
        self._num_sources = num_sources
        self._num_compiled = self._num_found = 0
        self._library = ""

    def take(self, line: str) -> None:
        """The next line of the output."""
        line = line.strip()
        if re.match(r"Collecting |Requirement already satisfied", line):
            self._num_found += 1
            self.text = f"{_packages(self._num_found)} looked up"
        elif found := re.match(r"(?:Downloading|Using cached) (\S+?)-[^/]* \((.+)\)", line):
            self.text = f"downloading {found[1].rpartition('/')[2]} ({found[2]})"
        elif found := re.match(r"building '.*\.(\w+)' extension", line):
            self._library, self._num_compiled = found[1], 0
        elif re.search(r" -c \S*kernels/csrc/\S+\.c ", f"{line} "):
            self._num_compiled += 1
            self.text = (
                f"compiling kernels: {self._library}, file {self._num_compiled} of "
                f"{self._num_sources}"
            )
        elif found := re.match(r"Installing collected packages: (.*)", line):
            self.text = f"writing {_packages(found[1].count(',') + 1)}"


def _packages(count: int) -> str:
    return "1 package" if count == 1 else f"{count} packages"


def main(log: Path, arguments: list[str]) -> int:
    """Returns pip's exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    steps = Steps(len(list(SOURCES.glob("*.c"))))
    words = ("-m", "pip", "install", "-v", "--disable-pip-version-check", "--progress-bar", "off")
    told_s, told = time.monotonic(), ""
    with (
        log.open("w", encoding="utf-8", errors="replace") as file,
        subprocess.Popen(
            [sys.executable, *words, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as pip,
    ):
        assert pip.stdout is not None, "it was asked for"
        for line in pip.stdout:
            file.write(line)
            file.flush()
            steps.take(line)
            if steps.text != told and time.monotonic() - told_s > PERIOD_S:
                told_s, told = time.monotonic(), steps.text
                print(f"[legato]   {told}", flush=True)
    if pip.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LAST_LINES:]
        print("\n".join(last), file=sys.stderr)
        print(f"[legato] pip failed; all that it said is in {log}", file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
