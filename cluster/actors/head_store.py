"""HeadStore: the little that outlives an actor's process, kept by Ray's head."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ray.experimental import internal_kv

from legato.cluster.adoption import ControllerMemory

_MEMORY = "memory"


class HeadStore:
    """One service's entries: the controller's memory, each router's port, each worker's process.

    Ray's head has a store of its own, for as long as it lives; without the head nothing is started
    again, so nothing else would be of use to what is. A call never returns while the head is gone:
    each is made in a thread.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._newest: ControllerMemory | None = None
        self._written: ControllerMemory | None = None
        self._writing = asyncio.Lock()

    def note(self, memory: ControllerMemory) -> None:
        """To be kept by the next `flush`."""
        self._newest = memory

    @property
    def is_behind(self) -> bool:
        """True where `flush` has something to do."""
        return self._newest is not self._written

    async def flush(self) -> None:
        """Returns when all that was noted is kept; not before the head answers."""
        async with self._writing:
            while (memory := self._newest) is not self._written:
                assert memory is not None, "only what was noted is newer than what was written"
                await self.keep(_MEMORY, memory.to_json())
                self._written = memory

    async def memory(self) -> ControllerMemory | None:
        """What an earlier controller of the service noted; None where there was none."""
        kept = await self.recall(_MEMORY)
        return None if kept is None else ControllerMemory.from_json(kept)

    async def keep(self, key: str, value: object) -> None:
        """For the next process of the actor that says this. What JSON can hold."""
        await asyncio.to_thread(self._put, key, json.dumps(value).encode())

    async def recall(self, key: str) -> Any:  # noqa: ANN401  # whatever was kept
        """What was kept under the key; None where there is nothing."""
        data = await asyncio.to_thread(internal_kv._internal_kv_get, key, namespace=self._namespace)
        return None if data is None else json.loads(data)

    async def drop(self, key: str) -> None:
        """Nobody will ask for it."""
        await asyncio.to_thread(internal_kv._internal_kv_del, key, namespace=self._namespace)

    async def ping(self) -> None:
        """Returns when the head has answered."""
        await self.recall(_MEMORY)

    def _put(self, key: str, value: bytes) -> None:
        internal_kv._internal_kv_put(key, value, namespace=self._namespace)


def forget(namespace: str) -> None:
    """Removes all entries of a service that has ended."""
    for key in internal_kv._internal_kv_list("", namespace=namespace):
        internal_kv._internal_kv_del(key, namespace=namespace)
