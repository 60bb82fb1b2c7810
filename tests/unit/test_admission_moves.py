"""Attempts that look for another decode worker and keep their prefill worker: in the queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from admission_scene import Pool, Scene, View, settle

from legato.cluster.policies import Demand

if TYPE_CHECKING:
    from legato.cluster.attempt_placement import Placement
    from legato.cluster.queue_entry import Entry


class Moves(Scene):
    async def move(self, name: str, entry: Entry, rows: int, *, avoid: str = "") -> None:
        """The decode worker of `name` is lost; another one is to be found."""
        old = self.placements.pop(name)
        old.give_up_decode()
        self.started.remove(name)

        async def wait() -> None:
            demand = Demand(rows - 1, rows, avoid=frozenset({avoid} if avoid else ()))
            placement = await self.queue.place(entry, demand, first=False, keep=old)
            self.started.append(name)
            self.placements[name] = placement
            placement.granted()

        self.tasks[name] = asyncio.create_task(wait())
        await settle()


def views(*sizes: int) -> list[View]:
    return [View(f"d{number}", size) for number, size in enumerate(sizes)]


def placed_on(placement: Placement) -> str:
    assert placement.decode is not None
    return placement.decode.worker_id


async def test_it_keeps_its_prefill_share_and_takes_another_decode_share() -> None:
    p, (d0, d1) = View("p", 100, "prefill"), views(100, 90)
    scene = Moves(Pool(prefill=[p], decode=[d0, d1]))
    entry = await scene.arrive("a", 41)
    assert (p.used_blocks, d0.used_blocks, d1.used_blocks) == (40, 41, 0)
    await scene.move("a", entry, 41, avoid="d0")
    assert (p.used_blocks, d0.used_blocks, d1.used_blocks) == (40, 0, 41)
    assert placed_on(scene.placements["a"]) == "d1"
    await scene.end("a")
    assert (p.used_blocks, p.backlog_tokens, d1.used_blocks) == (0, 0, 0)


async def test_it_needs_no_room_on_a_prefill_worker_not_even_one_that_is_there() -> None:
    pool = Pool(prefill=[View("p", 50, "prefill")], decode=views(100))
    scene = Moves(pool)
    entry = await scene.arrive("a", 51)  # all of the prefill worker
    other = await scene.arrive("b", 30)
    assert scene.started == ["a"]
    await scene.move("a", entry, 51)
    assert scene.started == ["a"]
    pool.prefill.clear()
    pool.empty_since["prefill"] = 0.0
    await scene.move("a", entry, 51)
    await scene.pass_time(60.0)
    assert scene.started == ["a"]
    assert "prefill pool has had no ready worker" in str(await scene.error("b"))
    assert other.placed is not None


async def test_it_waits_in_its_place_before_those_that_came_later() -> None:
    scene = Moves(Pool(decode=views(100)))
    first = await scene.arrive("a", 60)
    await scene.arrive("b", 40)
    await scene.arrive("c", 60)
    assert scene.started == ["a", "b"]
    scene.pool.decode[0].total = 40  # what was lost took room with it
    await scene.move("a", first, 40)
    assert scene.started == ["b"]
    await scene.end("b")
    assert scene.started == ["b", "a"]


async def test_a_smaller_one_passes_it_until_it_is_overdue() -> None:
    scene = Moves(Pool(decode=views(100)), max_passed_over_s=2.0)
    big = await scene.arrive("big", 60)
    scene.pool.decode[0].used_blocks += 50  # another's, or lost
    await scene.move("big", big, 60)
    await scene.arrive("small", 20)
    assert scene.started == ["small"]
    await scene.pass_time(2.0)
    await scene.arrive("late", 20)  # there is room for it, which is kept free
    assert scene.started == ["small"]
    scene.pool.decode[0].used_blocks -= 30
    scene.queue.dispatch()
    await settle()
    assert scene.started == ["small", "big"]


async def test_cancelled_in_the_queue_or_in_the_moment_of_being_placed_it_holds_nothing() -> None:
    p, decodes = View("p", 100, "prefill"), views(100)
    scene = Moves(Pool(prefill=[p], decode=decodes))
    entry = await scene.arrive("a", 41)
    decodes[0].used_blocks += 100
    await scene.move("a", entry, 41)
    assert "a" not in scene.started
    decodes[0].used_blocks -= 100
    scene.queue.dispatch()  # placed, and the task has not run yet
    scene.tasks["a"].cancel()
    await settle()
    assert (p.used_blocks, decodes[0].used_blocks) == (0, 0)
    assert scene.queue.num_queued == 0
    assert entry.keeps is None
