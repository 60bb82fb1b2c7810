"""PeerProcess: a peer's program in its own environment; every wait for it is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

HOST = Path(__file__).with_name("host.py")
_LINE_LIMIT_BYTES = 64 << 20
_STDERR_TAIL_BYTES = 1500


class PeerError(Exception):
    """The peer said no, died, hung or spoke nonsense; the message says which, and how it ended."""


class PeerProcess:
    """One process for one precision: `async with` starts it, and ends it with its children.

    No peer is running while another one is measured, so none can take a core by spinning.
    """

    def __init__(self, python: str, runner: Path, num_threads: int) -> None:
        # In a peer's environment nothing of ours may be found; our own needs its PYTHONPATH.
        isolation = "-P" if python == sys.executable else "-I"
        self._command = [python, isolation, str(HOST), str(runner)]
        self._environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._stderr,
                env=self._environment,
                limit=_LINE_LIMIT_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise PeerError(f"{self._command[0]} does not start: {error}") from error
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._running()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group, for what the peer has started
        await process.wait()
        self._stderr.close()

    @property
    def process_id(self) -> int:
        """While it runs."""
        return self._running().pid

    async def ask(self, timeout_s: float, **request: object) -> dict[str, Any]:
        """Sends a request and returns the answer.

        Raises:
            PeerError: there is none within `timeout_s`, or it is a refusal. Ask no more then.
        """
        try:
            line = await asyncio.wait_for(self._exchange(request), timeout_s)
        except TimeoutError:
            raise PeerError(f"no answer to {request['op']} within {timeout_s:g} s") from None
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        if not line:
            status = await self._status()
            raise PeerError(f"died during {request['op']} ({status}): {self._last_words()}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise PeerError(f"answered {request['op']} with {line[:200]!r}") from None
        if not isinstance(answer, dict):
            raise PeerError(f"answered {request['op']} with {line[:200]!r}")
        if not answer.get("ok"):
            raise PeerError(str(answer.get("error", answer)))
        return answer

    async def _exchange(self, request: dict[str, object]) -> bytes:
        process = self._running()
        assert process.stdin is not None, "started with a pipe"
        assert process.stdout is not None, "started with a pipe"
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
        return await process.stdout.readline()

    async def _status(self) -> str:
        try:
            return f"exit status {await asyncio.wait_for(self._running().wait(), 1.0)}"
        except TimeoutError:  # it closed its output and lives on
            return "still running"

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "used outside of `async with`"
        return self._process

    def _last_words(self) -> str:
        end = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, end - _STDERR_TAIL_BYTES))
        return self._stderr.read().decode(errors="replace").strip()
