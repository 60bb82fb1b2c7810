"""TcpProxy: a port in front of another one, which can be cut off or frozen like a process."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class TcpProxy:
    """Passes bytes on. Cut, it is what a dead process leaves; frozen, what a stopped one does."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._going = asyncio.Event()
        self._going.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""
        self.bytes_per_s: float | None = None  # each way

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Every connection is reset, no other is taken."""
        if self._server is not None:
            self._server.close()
        self.reset()

    def reset(self) -> None:
        """Every connection is reset; new ones are taken."""
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self) -> None:
        """Connections stay and new ones are taken, but no byte passes any more."""
        self._going.clear()

    def thaw(self) -> None:
        """What was held passes."""
        self._going.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(far_writer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                await self._going.wait()
                if self.bytes_per_s is not None:
                    await asyncio.sleep(len(data) / self.bytes_per_s)
                sink.write(data)
                await sink.drain()
        sink.transport.abort()
        self._writers.discard(sink)
