"""The queue where KV does not get from some prefill worker to some decode worker."""

from __future__ import annotations

from admission_scene import Pool, Scene, View

from legato.cluster.kv_paths import CLOSED_S, KvPaths


def scene_of(prefills: str, decodes: str, closed: str) -> Scene:
    scene = Scene(
        Pool(
            prefill=[View(name, 1000, "prefill") for name in prefills],
            decode=[View(name, 100) for name in decodes],
        ),
        max_passed_over_s=60.0,
    )
    scene.pool.paths = KvPaths(lambda: scene.now)
    for path in closed.split():
        scene.pool.paths.failed((path[0], path[1]))
    return scene


def pair_of(scene: Scene, name: str) -> str:
    placement = scene.placements[name]
    assert placement.decode is not None
    return placement.prefill.worker_id + placement.decode.worker_id


async def test_a_pair_without_a_path_is_not_picked() -> None:
    scene = scene_of("pq", "de", "pd")
    for number in range(8):
        await scene.arrive(str(number), 11)
        assert pair_of(scene, str(number)) != "pd"


async def test_one_waits_for_a_pair_with_a_path_and_holds_up_nobody() -> None:
    scene = scene_of("p", "de", "pe")
    await scene.arrive("a", 90)
    assert pair_of(scene, "a") == "pd"
    await scene.arrive("b", 60)
    await scene.arrive("c", 10)  # room for it is left where "b" waits for more
    assert scene.started == ["a", "c"]
    await scene.end("a")
    assert pair_of(scene, "b") == "pd"


async def test_a_path_that_failed_is_taken_again_after_a_while() -> None:
    scene = scene_of("p", "de", "pe")
    await scene.arrive("a", 90)
    await scene.arrive("b", 60)
    await scene.pass_time(CLOSED_S - 0.1)
    assert scene.started == ["a"]
    await scene.pass_time(0.2)
    assert pair_of(scene, "b") == "pe"


async def test_where_every_path_failed_any_is_taken() -> None:
    scene = scene_of("p", "d", "pd")
    await scene.arrive("a", 50)
    assert pair_of(scene, "a") == "pd"
    # Another worker that can never hold it is no choice either.
    scene.pool.decode.append(View("e", 10))
    await scene.arrive("b", 40)
    assert pair_of(scene, "b") == "pd"


async def test_what_ends_in_prefill_needs_no_path() -> None:
    scene = scene_of("p", "de", "pd")
    await scene.arrive("a", 0, prefill=10)
    assert scene.placements["a"].decode is None


async def test_one_that_keeps_its_prefill_worker_goes_where_that_one_has_a_path() -> None:
    scene = scene_of("p", "de", "")
    entry = await scene.arrive("a", 41)
    old = scene.placements.pop("a")
    assert old.decode is not None
    lost = old.decode.worker_id
    old.give_up_decode()
    scene.pool.paths.failed(("p", lost))
    placement = await scene.queue.place(entry, entry.demand, first=False, keep=old)
    assert placement.prefill is old.prefill
    assert placement.decode is not None
    assert placement.decode.worker_id != lost
