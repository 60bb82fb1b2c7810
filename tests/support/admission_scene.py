"""Scene: admission's queue over a pool of views, on a clock of its own and without a socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from legato.cluster.admission import Admission
from legato.cluster.config import RouterOptions
from legato.cluster.errors import RequestError
from legato.cluster.kv_paths import KvPaths
from legato.cluster.learnt import Learnt
from legato.cluster.policies import Demand, WorkerSnapshot

if TYPE_CHECKING:
    from legato.cluster.attempt_placement import Placement
    from legato.cluster.control_plane import Role
    from legato.cluster.queue_entry import Entry
    from legato.cluster.worker_view import DecodeShare


@dataclass
class View:
    """As much of a WorkerView as admission looks at; a block is one token."""

    worker_id: str
    total: int
    role: Role = "decode"
    used_blocks: int = 0
    backlog_tokens: int = 0
    refused: tuple[Demand, ...] = ()
    granted: list[DecodeShare] = field(default_factory=list)

    def note_use(self) -> None:
        """There is no other router."""

    def snapshot(self) -> WorkerSnapshot:
        return WorkerSnapshot(
            worker_id=self.worker_id,
            role=self.role,
            block_size=1,
            total_blocks=self.total,
            free_blocks=self.total - self.used_blocks,
            backlog_tokens=self.backlog_tokens,
            refused=self.refused,
        )


@dataclass
class Pool:
    prefill: list[View] = field(default_factory=lambda: [View("p", 10**6, "prefill")])
    decode: list[View] = field(default_factory=lambda: [View("d", 100)])
    empty_since: dict[Role, float | None] = field(
        default_factory=lambda: {"prefill": None, "decode": None, "colocated": None}
    )
    alone: list[View] = field(default_factory=list)
    paths: KvPaths = field(default_factory=KvPaths)
    learnt: Learnt = field(default_factory=Learnt)

    def placeable(self, role: Role) -> list[View]:
        return {"prefill": self.prefill, "decode": self.decode, "colocated": self.alone}[role]

    def needed_roles(self) -> tuple[Role, ...]:
        return ("prefill", "decode") if self.prefill or self.decode else ("colocated",)

    def view(self, worker_id: str) -> View | None:
        views = (*self.prefill, *self.decode, *self.alone)
        found = [v for v in views if v.worker_id == worker_id]
        return found[0] if found else None


class Scene:
    """A queue, a pool, a clock that stands still until told."""

    def __init__(self, pool: Pool | None = None, **options: Any) -> None:  # noqa: ANN401
        self.now = 0.0
        self.pool = pool or Pool()
        self.queue = Admission(
            RouterOptions(**options),
            self.pool,  # type: ignore[arg-type]  # what admission uses of it
            now=lambda: self.now,
        )
        self.started: list[str] = []
        self.placements: dict[str, Placement] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def arrive(
        self,
        name: str,
        rows: int,
        *,
        prefill: int | None = None,
        batch: bool = False,
        granted: bool = True,
        entry: Entry | None = None,
        begun: bool = False,
        giving_back: Placement | None = None,
    ) -> Entry:
        """Asks for so many rows of KV on decode, now and at the end; its ticket is `granted` at
        once. `prefill`: the prompt alone, if it shall be shorter.
        """
        prompt = max(1, rows - 1) if prefill is None else prefill
        place = entry or self.queue.enter(1)[0]

        async def wait() -> None:
            if giving_back is not None:
                giving_back.release()
            demand = Demand(prompt, rows, batch=batch)
            placement = await self.queue.place(place, demand, first=not begun)
            self.started.append(name)
            self.placements[name] = placement
            if granted:
                placement.granted()

        self.tasks[name] = asyncio.create_task(wait())
        await settle()
        return place

    async def refuse(self, name: str, entry: Entry, rows: int, **how: Any) -> None:  # noqa: ANN401
        """The decode worker has no room after all: back to the queue."""
        placement = self.placements.pop(name)
        assert placement.decode is not None
        view = self.pool.view(placement.decode.worker_id)
        assert view is not None
        view.refused += (entry.demand,)
        self.started.remove(name)
        await self.arrive(name, rows, entry=entry, giving_back=placement, **how)

    async def report(self) -> None:
        """All workers tell their load."""
        for view in self.pool.decode:
            view.refused = ()
        self.queue.dispatch()
        await settle()

    async def end(self, name: str) -> None:
        self.placements.pop(name).release()
        await settle()

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.queue.dispatch()
        await settle()

    async def error(self, name: str) -> RequestError:
        with pytest.raises(RequestError) as raised:
            await asyncio.wait_for(self.tasks[name], 1)
        return raised.value


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
