"""A worker changes its pool: who may, what happens on the way, and what where it fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
from controller_world import World

from legato.cluster.actors.plans import WorkerPlan
from legato.cluster.config import EngineOptions
from legato.cluster.placement import WorkerPlacement
from legato.cluster.pool import ControllerOptions
from legato.cluster.resource_demand import NO_DEMAND, ResourceDemand
from legato.cluster.role_change import RoleChangeRefusedError, UnknownWorkerError
from legato.protos import cluster_pb2, common_pb2

OPTIONS = ControllerOptions()
PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE


def world(prefill: int = 2, decode: int = 1) -> World:
    """All are ready, at 1.0."""
    made = World(prefill=prefill, decode=decode)
    made.ready(*made.workers())
    made.launcher.take()
    return made


def status(world: World, role: int) -> cluster_pb2.PoolStatus:
    return next(pool for pool in world.controller.pools(2.0) if pool.role == role)


def sizes(world: World) -> tuple[int, int]:
    return status(world, PREFILL).target, status(world, DECODE).target


def test_a_worker_drains_in_its_pool_and_starts_in_the_other_under_another_name() -> None:
    w = world()
    change = w.controller.change_role("id-prefill-2", "decode", 2.0)
    assert change.worker_id == "id-prefill-2"
    assert {r: n for r, n in change.targets.items() if n} == {"prefill": 1, "decode": 2}
    assert w.ids() == ["id-prefill-1", "id-prefill-2 draining", "id-decode-1"]
    # Nobody is started in its place, in neither pool.
    w.controller.step(3.0)
    assert w.launcher.take() == ["retire prefill-2"]
    [_, draining] = status(w, PREFILL).workers
    assert (draining.phase, draining.becomes) == (common_pb2.WORKER_PHASE_DRAINING, DECODE)
    assert "1 coming from another pool" in status(w, DECODE).message

    w.controller.on_drained("prefill-2", 4.0)
    assert w.launcher.take() == ["rebuild prefill-2 decode-2"]
    assert w.ids() == ["id-prefill-1", "id-decode-1"]
    w.controller.on_dead("prefill-2", "old news", 4.5)
    assert w.launcher.take() == []
    w.ready("decode-2", now_s=5.0)
    assert w.ids() == ["id-prefill-1", "id-decode-1", "id-decode-2"]
    after = status(w, DECODE).workers[1]
    assert (after.predecessor, after.becomes) == ("id-prefill-2", 0)
    w.controller.step(6.0)
    assert w.launcher.take() == []
    assert not status(w, DECODE).message


def test_a_long_id_is_cut_in_the_sentence() -> None:
    # gRPC refuses a sentence that is longer than its headers may be.
    with pytest.raises(UnknownWorkerError) as raised:
        world().controller.change_role("x" * 10_000, "decode", 2.0)
    assert len(str(raised.value)) < 200


def test_the_router_knows_before_the_worker_refuses_new_work() -> None:
    w = world()
    order: list[str] = []
    w.controller._publish = lambda _: order.append("publish")
    w.launcher.retire = lambda name, timeout_s: order.append("retire")  # type: ignore[method-assign]  # watched
    w.controller.change_role("id-prefill-1", "decode", 2.0)
    assert order == ["publish", "retire"]


@pytest.mark.parametrize(("given", "found"), [("id-prefill-2", "id-prefill-2"), ("id-d", "id-d")])
def test_a_beginning_that_only_one_id_has_will_do(given: str, found: str) -> None:
    w = world(prefill=2, decode=2)
    w.controller.on_dead("decode-2", "gone", 1.5)
    w.controller.set_targets({"decode": 1}, 1.6)
    w.ready("decode-3")
    if found == "id-d":
        with pytest.raises(RoleChangeRefusedError, match="id-decode-1 is the last ready"):
            w.controller.change_role(given, "prefill", 2.0)
    else:
        assert w.controller.change_role(given, "decode", 2.0).worker_id == found


def test_an_id_that_is_the_beginning_of_another_is_itself() -> None:
    w = world(prefill=10)
    assert w.controller.change_role("id-prefill-1", "decode", 2.0).worker_id == "id-prefill-1"


def test_one_that_is_drained_by_hand_is_replaced_at_once() -> None:
    w = world(prefill=2)
    assert w.controller.drain_worker("id-prefill-1", 2.0) == "id-prefill-1"
    assert w.launcher.take() == ["drain prefill-1", "start prefill-3"]
    with pytest.raises(RoleChangeRefusedError, match="prefill-1 is draining: only a ready worker"):
        w.controller.drain_worker("id-prefill-1", 2.1)
    with pytest.raises(UnknownWorkerError):
        w.controller.drain_worker("id-other", 2.1)
    w.controller.on_drained("prefill-1", 3.0)
    assert w.launcher.take() == ["kill prefill-1"]


def test_the_last_ready_one_is_drained_once_another_is_ready_in_its_place() -> None:
    w = world(prefill=1)
    assert w.controller.drain_worker("id-prefill", 2.0) == "id-prefill-1"
    assert w.launcher.take() == ["start prefill-2"]
    assert "id-prefill-1" in w.ids(), "it serves"
    assert "1 is drained once another is ready" in status(w, PREFILL).message
    w.controller.drain_worker("id-prefill", 2.1)  # the same again changes nothing
    assert w.launcher.take() == []
    w.controller.on_dead("prefill-2", "its start failed", 3.0)
    w.controller.step(10.0)
    assert w.launcher.take() == ["kill prefill-2", "start prefill-3"]
    w.ready("prefill-3", now_s=11.0)
    assert w.launcher.take() == ["drain prefill-1"]
    assert w.ids() == ["id-prefill-1 draining", "id-prefill-3", "id-decode-1"]
    w.controller.on_drained("prefill-1", 12.0)
    w.controller.step(13.0)
    assert w.launcher.take() == ["kill prefill-1"]


def test_one_that_is_to_be_drained_goes_with_its_pool() -> None:
    w = world(prefill=1)
    w.controller.drain_worker("id-prefill", 2.0)
    w.launcher.take()
    w.controller.set_targets({"prefill": 0}, 3.0)
    assert sorted(w.launcher.take()) == ["drain prefill-1", "kill prefill-2"]


def test_all_workers_of_a_node_go_in_whatever_state_they_are() -> None:
    w = world(prefill=2, decode=2)
    w.controller.change_role("id-decode-2", "prefill", 1.5)
    w.controller.set_targets({"prefill": 4}, 1.6)  # prefill-3 starts; decode-2 is on its way
    assert w.launcher.take() == ["retire decode-2", "start prefill-3"]
    gone = w.controller.drain_workers(["prefill-1", "prefill-3", "decode-2", "nobody"], 2.0)
    assert gone == ["id-prefill-1", "prefill-3", "id-decode-2"]
    assert sorted(w.launcher.take()) == sorted(
        [
            "drain prefill-1",
            "kill prefill-3",
            "start prefill-4",
            "start prefill-5",
            "start prefill-6",
        ]
    )
    w.controller.on_drained("decode-2", 3.0)  # and does not go on there
    assert w.launcher.take() == ["kill decode-2"]
    assert status(w, PREFILL).target == 4


def refuse(w: World, kind: type[ValueError], sentence: str, worker: str, role: str) -> None:
    before = sizes(w), w.ids()
    with pytest.raises(kind, match=sentence) as raised:
        w.controller.change_role(worker, role, 2.0)  # type: ignore[arg-type]  # wrong ones too
    assert type(raised.value) is kind
    assert (sizes(w), w.ids()) == before
    assert w.launcher.take() == []


def test_who_may_not() -> None:
    w = world()
    refuse(w, UnknownWorkerError, "begins with 'id-other'", "id-other", "decode")
    refuse(w, ValueError, "worker_id is empty", "", "decode")
    refuse(w, ValueError, "begins 2 ids: id-prefill-1, id-prefill-2", "id-pre", "decode")
    refuse(w, ValueError, "pool must be .* got 'other'", "id-prefill-1", "other")
    refuse(w, RoleChangeRefusedError, "is a prefill worker already", "id-prefill-1", "prefill")
    refuse(
        w,
        RoleChangeRefusedError,
        "last ready worker of the decode pool, .* legato scale decode=2",
        "id-decode-1",
        "prefill",
    )
    w.launcher.mismatch = "its weights are float32, a decode worker's are bfloat16"
    sentence = "prefill-1 cannot become a decode worker: its weights are float32, .* bfloat16"
    refuse(w, RoleChangeRefusedError, sentence, "id-prefill-1", "decode")


def test_one_that_is_not_ready_may_not() -> None:
    w = world(prefill=3)
    w.controller.set_targets({"decode": 2, "prefill": 2}, 1.5)  # decode-2 starts, prefill-3 drains
    w.launcher.take()
    refuse(w, RoleChangeRefusedError, "decode-2 is starting: only a ready", "decode-2", "prefill")
    refuse(w, RoleChangeRefusedError, "prefill-3 is draining: only", "id-prefill-3", "decode")
    w.controller.change_role("id-prefill-1", "decode", 2.0)
    w.launcher.take()
    refuse(w, RoleChangeRefusedError, "is on its way to the decode pool", "id-prefill-1", "decode")


def test_a_pool_that_is_as_large_as_may_be_takes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.cluster.controller.MAX_POOL_SIZE", 2)
    refuse(
        world(prefill=2, decode=2),
        RoleChangeRefusedError,
        "decode has 2 workers, limit 2",
        "id-prefill-1",
        "decode",
    )


def test_one_that_dies_while_it_drains_is_replaced_in_its_new_pool() -> None:
    w = world()
    w.controller.change_role("id-prefill-2", "decode", 2.0)
    w.launcher.take()
    w.controller.on_dead("prefill-2", "killed", 3.0)
    assert w.launcher.take() == ["kill prefill-2", "start decode-2"]
    assert sizes(w) == (1, 2)


def test_one_that_does_not_drain_in_time_is_ended_and_replaced() -> None:
    w = world()
    w.controller.change_role("id-prefill-2", "decode", 2.0)
    w.launcher.take()
    late_s = 2.1 + OPTIONS.drain_timeout_s + OPTIONS.drain_slack_s
    w.controller.step(late_s)
    w.controller.step(late_s)
    assert w.launcher.take() == ["kill prefill-2", "start decode-2"]


def test_one_that_fails_to_start_anew_is_replaced_after_a_back_off() -> None:
    w = world()
    w.controller.change_role("id-prefill-2", "decode", 2.0)
    w.controller.on_drained("prefill-2", 3.0)
    w.launcher.take()
    w.controller.on_dead("decode-2", "the KV memory of the old role is still in use", 4.0)
    assert w.launcher.take() == ["kill decode-2"]
    w.controller.step(4.0 + OPTIONS.backoff_s)
    assert w.launcher.take() == ["start decode-3"]


def test_a_pool_that_was_scaled_in_meanwhile_takes_it_not() -> None:
    w = world()
    w.controller.change_role("id-prefill-2", "decode", 2.0)
    w.controller.set_targets({"decode": 1}, 3.0)
    w.launcher.take()
    w.controller.on_drained("prefill-2", 4.0)
    assert w.launcher.take() == ["kill prefill-2"]
    assert w.ids() == ["id-prefill-1", "id-decode-1"]


def test_a_pool_that_was_scaled_out_meanwhile_starts_only_what_is_missing_beside_it() -> None:
    w = world()
    w.controller.change_role("id-prefill-2", "decode", 2.0)
    w.launcher.take()
    w.controller.set_targets({"decode": 4}, 3.0)
    assert w.launcher.take() == ["start decode-2", "start decode-3"]
    w.controller.on_drained("prefill-2", 4.0)
    assert w.launcher.take() == ["rebuild prefill-2 decode-4"]


def test_nobody_starts_anew_while_the_service_ends() -> None:
    w = world()
    w.controller.change_role("id-prefill-2", "decode", 2.0)
    w.controller.close()
    w.launcher.take()
    w.controller.on_drained("prefill-2", 3.0)
    assert w.launcher.take() == ["kill prefill-2"]


def test_what_keeps_every_worker_of_one_role_from_another() -> None:
    engine, place = EngineOptions(), WorkerPlacement(None, "cpu", NO_DEMAND, 1, 1)
    plan = WorkerPlan(
        model="m",
        engines={"prefill": engine, "decode": engine},
        placements={"prefill": place, "decode": place},
        spread=False,
    )
    assert plan.obstacle("prefill", "decode") == ""

    narrow = {"prefill": engine, "decode": replace(engine, dtype="bfloat16")}
    assert (
        replace(plan, engines=narrow).obstacle("prefill", "decode")
        == "its weights are loaded for dtype auto, a decode worker's are bfloat16"
    )
    on_gpu = {"prefill": place, "decode": replace(place, device="cuda")}
    assert (
        replace(plan, placements=on_gpu).obstacle("decode", "prefill")
        == "its weights are on cuda, a prefill worker's are on cpu"
    )
    large = {"prefill": place, "decode": replace(place, demand=ResourceDemand(cpus=4))}
    assert (
        replace(plan, placements=large).obstacle("prefill", "decode")
        == "its place was chosen for nothing, a decode worker asks for CPU=4"
    )
