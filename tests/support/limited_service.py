"""LimitedService: a router over fake workers in a process that may open few files."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fake_worker import FakeWorker
from router_service import Service

if TYPE_CHECKING:
    from types import TracebackType

STOP_TIMEOUT_S = 20.0


class Ports(NamedTuple):
    """host:port of each."""

    grpc: str
    http: str


class LimitedService:
    """Use as a context manager, which gives the ports; its process ends with the block.

    `log` is what it has written by then, gRPC's and asyncio's complaints too.
    """

    def __init__(self, max_open_files: int) -> None:
        self._max_open_files = max_open_files
        self.log = ""

    def __enter__(self) -> Ports:
        self._written = tempfile.TemporaryFile("w+")  # closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._max_open_files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._written,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the service has not started"
        return Ports(*json.loads(line))

    def memory_mb(self) -> float:
        """What its process has in memory of its own."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        [kb] = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")]
        return int(kb) / 1000

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            with self._written:
                self._written.seek(0)
                self.log = self._written.read()


async def _serve() -> None:
    workers = [FakeWorker("prefill")], [FakeWorker("decode", total_blocks=4000)]
    async with Service(*workers, http_port=0) as service:
        print(json.dumps([service.address, service.router.http_address]), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    most = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(_serve())
