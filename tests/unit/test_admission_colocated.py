"""The queue where there are colocated workers: alone, or beside a pair."""

from __future__ import annotations

from admission_scene import Pool, Scene, View, settle

from legato.cluster.policies import Demand


def scene(*sizes: int, pair: bool = False, **options: float) -> Scene:
    alone = [View(f"c{i}", size, "colocated") for i, size in enumerate(sizes)]
    pool = Pool(alone=alone) if pair else Pool([], [], alone=alone)
    return Scene(pool, **options)


async def test_a_request_takes_its_blocks_once_and_gives_back_all() -> None:
    queue = scene(100)
    await queue.arrive("a", 60)
    [view] = queue.pool.alone
    placement = queue.placements["a"]
    assert placement.is_colocated
    assert (view.used_blocks, view.backlog_tokens) == (60, 59)
    placement.computed()
    assert (view.used_blocks, view.backlog_tokens) == (60, 0)
    await queue.arrive("b", 50)
    assert queue.started == ["a"]
    await queue.end("a")
    assert queue.started == ["a", "b"]
    await queue.end("b")
    assert (view.used_blocks, view.backlog_tokens) == (0, 0)


async def test_several_answers_are_placed_as_the_first_one() -> None:
    queue = scene(100)
    [entry] = queue.queue.enter(1)
    placement = await queue.queue.place(entry, Demand(50, 60, num_answers=9), first=True)
    assert placement.demand == Demand(50, 60)
    placement.release()


async def test_a_pair_without_room_leaves_it_to_the_colocated_worker() -> None:
    queue = scene(100, pair=True)
    await queue.arrive("a", 80)
    await queue.arrive("b", 80)
    await queue.arrive("c", 80)
    assert queue.started == ["a", "b"]
    assert [queue.placements[name].is_colocated for name in "ab"] == [False, True]
    await queue.end("b")
    assert queue.started == ["a", "b", "c"]
    assert queue.placements["c"].is_colocated


async def test_small_ones_do_not_starve_a_big_one() -> None:
    queue = scene(100, max_passed_over_s=2.0)
    await queue.arrive("small", 40)
    await queue.arrive("big", 90)
    await queue.arrive("passes", 30)
    assert queue.started == ["small", "passes"]
    await queue.pass_time(2.0)
    await queue.arrive("late", 30)
    assert queue.started == ["small", "passes"], "one worker is kept free for the big one"
    await queue.end("small")
    await queue.end("passes")
    await settle()
    assert queue.started == ["small", "passes", "big"]


async def test_a_big_one_closes_one_worker_and_small_ones_go_on_the_other() -> None:
    queue = scene(100, 100, max_passed_over_s=2.0)
    await queue.arrive("one", 60)
    await queue.arrive("two", 60)
    await queue.arrive("big", 90)
    await queue.pass_time(2.0)
    for name in ("x", "y", "z"):
        await queue.arrive(name, 20)
    used = sorted(view.used_blocks for view in queue.pool.alone)
    assert used == [60, 100], "all went to the worker that is not kept free"
    kept = min(queue.pool.alone, key=lambda view: view.used_blocks).worker_id
    placed = {name: p.prefill.worker_id for name, p in queue.placements.items()}
    await queue.end("one" if placed["one"] == kept else "two")
    assert queue.placements["big"].prefill.worker_id == kept


async def test_what_waits_too_long_is_told_which_pool_it_waits_for() -> None:
    queue = scene(100, worker_wait_s=5.0)
    queue.pool.alone.clear()
    queue.pool.empty_since["colocated"] = 0.0
    await queue.arrive("a", 10)
    await queue.pass_time(5.0)
    assert "the colocated pool has had no ready worker for 5 s" in str(await queue.error("a"))


async def test_what_only_the_colocated_worker_can_hold_waits_for_it() -> None:
    queue = scene(500, pair=True)
    await queue.arrive("a", 400)
    await queue.arrive("b", 300)
    assert queue.started == ["a"]
    await queue.end("a")
    assert queue.started == ["a", "b"]
    await queue.arrive("c", 600)
    assert "no decode worker can hold this request" in str(await queue.error("c"))
