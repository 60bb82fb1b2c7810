"""ServerProcess: a server with all it starts; every wait for it is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
from typing import TYPE_CHECKING

import psutil

from legato.bench.peers.peer_process import PeerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

_POLL_S = 0.1
_TAIL_BYTES = 1500


def free_port() -> int:
    """A port of loopback that nobody listens on as of now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class ServerProcess:
    """`async with` starts it, and ends it: politely first, then it and its children for good."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        end_timeout_s: float = 15.0,
    ) -> None:
        self._command = list(command)
        self._environment = os.environ | dict(environment or {})
        self._end_timeout_s = end_timeout_s
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            self._output.close()
            raise PeerError(f"{self._command[0]} does not start: {error}") from error
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._running()
        # Those in sessions of their own are not in the group.
        family = self._family()
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self._end_timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # also where its id is another's now
                one.kill()
        await process.wait()
        self._output.close()

    async def until(self, ready: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        """Asks `ready` again and again.

        Raises:
            PeerError: it is not within `timeout_s`, or the server has ended.
        """
        process = self._running()
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while not await ready():
            if process.returncode is not None:
                raise PeerError(f"ended with {process.returncode}: {self.last_words()}")
            if asyncio.get_running_loop().time() > deadline_s:
                raise PeerError(f"not ready within {timeout_s:g} s: {self.last_words()}")
            await asyncio.sleep(_POLL_S)

    def process_ids(self) -> list[int]:
        """Its own, and those of all it has started and that live."""
        return [one.pid for one in self._family()]

    def output(self) -> str:
        """All it has printed."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def last_words(self) -> str:
        """The end of it."""
        return self.output()[-_TAIL_BYTES:].strip()

    def _family(self) -> list[psutil.Process]:
        try:
            process = psutil.Process(self._running().pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "used outside of `async with`"
        return self._process
