"""Links: one to each decode worker that KV is sent to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from legato.worker.handoff.link import Link

if TYPE_CHECKING:
    from legato.worker.handoff.link import LinkParts


class Links:
    """By address and worker: a worker that was restarted at an address is another one. Those that
    broke or were idle for long are gone by themselves.
    """

    def __init__(self, parts: LinkParts) -> None:
        self._parts = parts
        self._links: dict[tuple[str, str], Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def to(self, address: str, worker_id: str) -> Link:
        """One that is open, or about to be."""
        key = address, worker_id
        link = self._links.get(key)
        if link is None or not link.is_open:
            link = self._links[key] = Link(address, worker_id, self._parts)
            task = asyncio.get_running_loop().create_task(self._run(key, link))
            self._tasks.add(task)  # a task that nobody holds may be collected while it runs
            task.add_done_callback(self._tasks.discard)
        return link

    async def close(self) -> None:
        """Ends all; transfers under way on them break."""
        await asyncio.sleep(
            0
        )  # a task that is cancelled before it has begun would clean up nothing
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: tuple[str, str], link: Link) -> None:
        try:
            await link.run()
        finally:
            if self._links.get(key) is link:
                del self._links[key]
