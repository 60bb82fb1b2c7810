"""Links: one to each decode worker that KV is sent to."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from legato.worker.handoff.link import Link
from legato.worker.handoff.retries import Retries

if TYPE_CHECKING:
    from legato.worker.handoff.link import LinkParts

# From when a link broke, where none came after it: longer than a transfer waits for one.
RETRIES_KEPT_S = 10.0


class Links:
    """By address and worker: a worker that was restarted at an address is another one. Those that
    broke or were idle for long are gone by themselves.
    """

    def __init__(self, parts: LinkParts) -> None:
        self._parts = parts
        self._links: dict[tuple[str, str], Link] = {}
        self._retries: dict[tuple[str, str], Retries] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    async def to(self, address: str, worker_id: str, until_s: float | None) -> Link | None:
        """One that is open, or about to be; not too soon after one that broke. None: it would be
        later than `until_s` of the monotonic clock, or all are closed.
        """
        key = address, worker_id
        while not self._closing.is_set():
            link = self._links.get(key)
            if link is not None and link.is_open:
                return link
            retries = self._retries.get(key)
            now_s = time.monotonic()
            wait_s = 0.0 if retries is None else retries.wait_s(now_s)
            if until_s is not None and now_s + wait_s >= until_s:
                return None
            if wait_s == 0:
                return self._new(key)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._closing.wait()
        return None

    async def close(self) -> None:
        """Ends all; transfers under way on them break."""
        self._closing.set()
        # A task that is cancelled before it has begun would clean up nothing.
        await asyncio.sleep(0)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for retries in self._retries.values():
            retries.close()
        self._retries.clear()

    def _new(self, key: tuple[str, str]) -> Link:
        retries = self._retries.get(key)
        if retries is None:
            retries = self._retries[key] = Retries(self._parts.new_memory)
        link = self._links[key] = Link(*key, self._parts, retries)
        task = asyncio.get_running_loop().create_task(self._run(key, link, retries))
        self._tasks.add(task)  # a task that nobody holds may be collected while it runs
        task.add_done_callback(self._tasks.discard)
        return link

    async def _run(self, key: tuple[str, str], link: Link, retries: Retries) -> None:
        try:
            await link.run()
        finally:
            if self._links.get(key) is link:
                del self._links[key]
            asyncio.get_running_loop().call_later(
                RETRIES_KEPT_S if link.has_broken else 0, self._forget, key, retries
            )

    def _forget(self, key: tuple[str, str], retries: Retries) -> None:
        if key not in self._links and self._retries.get(key) is retries:
            del self._retries[key]
            retries.close()
