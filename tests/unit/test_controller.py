from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from controller_world import FakeLauncher, World

from legato.cluster.controller import Controller
from legato.cluster.launcher import StartedWorker
from legato.cluster.pool import ControllerOptions, WorkerState
from legato.protos import common_pb2

if TYPE_CHECKING:
    from legato.cluster.control_plane import Role

OPTIONS = ControllerOptions()


def test_it_starts_what_is_missing_and_publishes_what_is_ready() -> None:
    world = World(prefill=1, decode=2)
    assert world.launcher.take() == ["start prefill-1", "start decode-1", "start decode-2"]
    assert world.published == []
    world.ready("decode-2", "prefill-1")
    assert world.ids() == ["id-prefill-1", "id-decode-2"]
    world.controller.step(2.0)
    assert world.launcher.take() == []
    assert len(world.published) == 2  # and not once more without a change


def test_a_dead_worker_is_unpublished_and_replaced_at_once_when_it_had_lived() -> None:
    world = World()
    world.ready("prefill-1", "decode-1", now_s=1.0)
    world.launcher.take()
    world.controller.on_dead("decode-1", "killed", 1.0 + OPTIONS.early_life_s)
    assert world.ids() == ["id-prefill-1"]
    assert world.launcher.take() == ["kill decode-1", "start decode-2"]
    world.ready("decode-2", now_s=9.0)
    assert world.ids() == ["id-prefill-1", "id-decode-2"]


def test_who_asks_is_told_once_which_workers_were_lost() -> None:
    world = World()
    world.ready("prefill-1", "decode-1", now_s=1.0)
    assert world.controller.take_news() == []
    world.controller.on_dead("decode-1", "killed", 50.0)
    assert world.controller.take_news() == ["decode worker id-decode-1 is lost: killed"]
    assert world.controller.take_news() == []
    world.controller.on_dead("decode-2", "no memory", 51.0)  # it never served
    assert world.controller.take_news() == []
    world.controller.step(60.0)
    world.ready("decode-3", now_s=61.0)
    assert world.controller.take_news() == [
        "decode worker id-decode-3 is ready in the place of a lost one"
    ]
    world.controller.set_targets({"decode": 2}, 62.0)
    world.ready("decode-4", now_s=63.0)
    assert world.controller.take_news() == []


def test_an_early_death_is_replaced_after_a_back_off() -> None:
    world = World()
    world.ready("prefill-1", "decode-1", now_s=1.0)
    world.launcher.take()
    world.controller.on_dead("decode-1", "killed", 2.0)
    assert world.launcher.take() == ["kill decode-1"]
    world.controller.step(2.0 + OPTIONS.backoff_s - 0.01)
    assert world.launcher.take() == []
    world.controller.step(2.0 + OPTIONS.backoff_s)
    assert world.launcher.take() == ["start decode-2"]


def test_early_deaths_of_workers_that_served_wait_longer_each_time_and_never_all_at_once() -> None:
    world = World()
    world.ready("prefill-1")
    now_s, waits_s = 0.0, []
    for number in range(1, 10):
        world.ready(f"decode-{number}", now_s=now_s)
        world.controller.on_dead(f"decode-{number}", "killed", now_s + 1.0)
        world.launcher.take()
        died_s = now_s = now_s + 1.0
        while f"start decode-{number + 1}" not in world.launcher.take():
            now_s += 0.25
            world.controller.step(now_s)
        waits_s.append(now_s - died_s)
    assert waits_s == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_whole_pool_that_dies_young_is_back_soon() -> None:
    world = World(decode=3)
    world.ready("decode-1", "decode-2", "decode-3", now_s=1.0)
    world.launcher.take()
    for number in (1, 2, 3):
        world.controller.on_dead(f"decode-{number}", "killed", 2.0)
    now_s = 2.0
    while len(world.workers()) < 4:
        assert now_s < 6.0
        now_s += 0.2
        world.controller.step(now_s)


def test_with_restart_off_a_lost_worker_is_missed_until_somebody_scales() -> None:
    world = World(decode=2, restart=False)
    world.ready("prefill-1", "decode-1", "decode-2", now_s=1.0)
    world.launcher.take()
    world.controller.on_dead("decode-1", "killed", 50.0)
    world.controller.step(500.0)
    assert world.launcher.take() == ["kill decode-1"]
    status = world.controller.pools(500.0)[1]
    assert "1 of 2 ready; 1 lost and not replaced; last: decode-1: killed" in status.message
    world.controller.set_targets({"decode": 2}, 501.0)
    assert world.launcher.take() == ["start decode-3"]
    assert "lost" not in world.controller.pools(501.0)[1].message


def test_with_restart_off_a_drained_worker_is_not_lost() -> None:
    world = World(decode=2, restart=False)
    world.ready("prefill-1", "decode-1", "decode-2", now_s=1.0)
    world.controller.set_targets({"decode": 1}, 10.0)
    world.controller.on_drained("decode-2", 11.0)
    assert world.controller.pools(11.0)[1].message == ""


def test_with_restart_off_a_start_that_fails_is_the_last_try() -> None:
    world = World(restart=False)
    assert world.controller.hopeless() == ""
    world.controller.on_dead("decode-1", "no room", 1.0)
    assert world.controller.hopeless() == "decode-1: no room"


def test_three_failed_starts_pause_and_say_why() -> None:
    world = World()
    world.ready("prefill-1")
    now_s = 1.0
    for number in (1, 2, 3):
        assert world.controller.hopeless() == ""
        world.controller.on_dead(f"decode-{number}", "tensor x is missing", now_s)
        now_s += 5.0
        world.controller.step(now_s)
    world.launcher.take()
    assert world.controller.hopeless() == "decode-3: tensor x is missing; 3 starts failed in a row"
    status = world.controller.pools(now_s)[1]
    assert "0 of 1 ready" in status.message
    assert "3 in a row, next try in 25 s: decode-3: tensor x is missing" in status.message
    world.controller.step(now_s + 24.9)
    assert world.launcher.take() == []
    world.controller.step(now_s + 25.1)
    assert world.launcher.take() == ["start decode-4"]


def test_a_permanent_failure_pauses_at_once_and_scaling_tries_anew() -> None:
    world = World(decode=2)
    world.launcher.take()
    world.controller.on_dead("decode-1", "no such folder", 1.0, permanent=True)
    assert world.controller.hopeless() == "decode-1: no such folder"
    world.controller.step(2.0)
    assert world.launcher.take() == ["kill decode-1"]
    world.controller.set_targets({"decode": 3}, 3.0)
    assert world.launcher.take() == ["start decode-3", "start decode-4"]
    assert world.controller.hopeless() == ""


def test_failures_are_forgotten_once_a_later_worker_has_lived() -> None:
    world = World()
    world.ready("prefill-1")
    world.controller.on_dead("decode-1", "oops", 1.0)
    world.controller.step(2.0)
    world.ready("decode-2", now_s=3.0)
    world.controller.step(3.0 + OPTIONS.early_life_s)
    world.launcher.take()
    world.controller.on_dead("decode-2", "killed", 20.0)
    assert world.launcher.take() == ["kill decode-2", "start decode-3"]


def test_scale_in_drains_the_newest_and_leaves_the_other_pool_alone() -> None:
    world = World(prefill=2, decode=2)
    world.ready("prefill-1", "prefill-2", "decode-1", "decode-2")
    world.launcher.take()
    assert world.controller.set_targets({"decode": 1}, 5.0) == {"prefill": 2, "decode": 1}
    assert world.launcher.take() == ["drain decode-2"]
    assert world.ids() == [
        "id-prefill-1",
        "id-prefill-2",
        "id-decode-1",
        "id-decode-2 draining",
    ]
    assert "1 draining" in world.controller.pools(5.0)[1].message
    world.controller.on_drained("decode-2", 6.0)
    assert world.launcher.take() == ["kill decode-2"]
    assert world.ids() == ["id-prefill-1", "id-prefill-2", "id-decode-1"]
    assert world.controller.pools(6.0)[1].message == ""


def test_the_router_hears_of_a_drain_before_the_worker_does() -> None:
    order: list[str] = []

    class Launcher(FakeLauncher):
        def drain(self, name: str, timeout_s: float) -> None:
            order.append("drain")

    targets: dict[Role, int] = {"prefill": 1, "decode": 1}
    controller = Controller(Launcher(), lambda _: order.append("publish"), targets)
    controller.step(0.0)
    controller.on_ready("decode-1", StartedWorker("x", "h:1", 1, "h"), 1.0)
    order.clear()
    controller.set_targets({"decode": 0}, 2.0)
    assert order == ["publish", "drain"]


def test_scale_in_takes_starting_workers_before_ready_ones() -> None:
    world = World(decode=3)
    world.ready("decode-1", "decode-3")
    world.launcher.take()
    world.controller.set_targets({"decode": 1}, 5.0)
    assert world.launcher.take() == ["kill decode-2", "drain decode-3"]


def test_a_pool_that_is_made_a_thousand_starts_so_many_at_a_time() -> None:
    world = World()
    world.ready("prefill-1", "decode-1")
    world.launcher.take()
    world.controller.set_targets({"decode": 1024}, 2.0)
    most = OPTIONS.max_starting
    first = [f"decode-{number}" for number in range(2, most + 2)]
    assert world.launcher.take() == [f"start {name}" for name in first]
    world.controller.step(3.0)
    assert world.launcher.take() == []
    world.ready(*first[:2], now_s=4.0)
    assert world.launcher.take() == [f"start decode-{most + 2}", f"start decode-{most + 3}"]
    # What has not begun costs nothing to take back.
    world.controller.set_targets({"decode": 1}, 5.0)
    assert len(world.workers()) == 4, "prefill-1, decode-1, and two that drain"


def test_a_drained_place_is_not_counted_when_the_pool_grows_again() -> None:
    world = World(decode=1)
    world.ready("decode-1")
    world.controller.set_targets({"decode": 0}, 2.0)
    world.launcher.take()
    world.controller.set_targets({"decode": 1}, 3.0)
    assert world.launcher.take() == ["start decode-2"]


def test_a_drain_and_a_start_have_their_bounds() -> None:
    world = World()
    world.ready("decode-1")
    world.controller.set_targets({"decode": 0}, 2.0)
    world.launcher.take()
    bound_s = OPTIONS.drain_timeout_s + OPTIONS.drain_slack_s
    world.controller.step(2.0 + bound_s)
    assert world.launcher.take() == []
    world.controller.step(2.0 + bound_s + 0.1)
    assert world.launcher.take() == ["kill decode-1"]
    world.launcher.shortage = "weights 50 %"
    world.controller.step(OPTIONS.start_timeout_s + 0.1)
    assert world.launcher.take() == ["kill prefill-1"]
    message = world.controller.pools(OPTIONS.start_timeout_s + 0.1)[0].message
    assert "prefill-1: not ready 120 s after its start: weights 50 %" in message


def test_a_worker_without_room_waits_without_end_and_its_start_counts_from_its_place() -> None:
    world = World()
    world.ready("prefill-1")
    world.launcher.take()
    world.launcher.no_room, world.launcher.shortage = {"decode-1"}, "waiting for room: …"
    for now_s in range(2, 1000):
        world.controller.step(float(now_s))
    assert world.launcher.take() == []
    assert world.controller.hopeless() == ""
    assert "0 of 1 ready; 1 starting; waiting for room" in world.controller.pools(999.0)[1].message
    world.launcher.no_room, world.launcher.shortage = set(), ""
    world.controller.step(999.0 + OPTIONS.start_timeout_s)
    assert world.launcher.take() == []
    world.controller.step(999.1 + OPTIONS.start_timeout_s)
    assert world.launcher.take() == ["kill decode-1"]


def test_workers_of_a_lost_node_are_no_failed_starts() -> None:
    world = World(decode=3)
    names = ("decode-1", "decode-2", "decode-3")
    world.ready("prefill-1", *names)
    world.launcher.take()
    for name in names:  # sooner than a worker may die
        world.controller.report_lost(f"id-{name}", "its stream broke", 2.0)
    assert world.controller.hopeless().startswith("decode-3: its stream broke; 3 starts")
    assert world.launcher.take() == [f"kill {name}" for name in names]
    world.controller.pardon("decode-1", 2.1)
    # One at a time while others are held against the pool, and all of them once none is.
    assert world.launcher.take() == ["start decode-4"]
    world.controller.pardon("decode-2", 2.1)
    world.controller.pardon("decode-3", 2.1)
    assert world.launcher.take() == ["start decode-5", "start decode-6"]
    assert world.controller.hopeless() == ""
    assert "failed" not in world.controller.pools(2.1)[1].message
    world.controller.pardon("decode-3", 2.2)  # once only
    world.controller.on_dead("decode-4", "oops", 2.3)
    assert "last, " in world.controller.pools(2.3)[1].message


def test_a_worker_that_the_router_lost_is_killed_and_replaced() -> None:
    world = World()
    world.ready("prefill-1", "decode-1")
    world.launcher.take()
    world.controller.report_lost("id-decode-1", "silent for 2 s", 30.0)
    assert world.launcher.take() == ["kill decode-1", "start decode-2"]
    world.controller.report_lost("id-decode-1", "silent for 2 s", 31.0)  # old news
    assert world.launcher.take() == []


def test_old_news_changes_nothing() -> None:
    world = World()
    world.ready("decode-1")
    world.controller.report_lost("id-decode-1", "gone", 30.0)
    world.launcher.take()
    world.controller.on_dead("decode-1", "its process ended", 30.1)
    world.controller.on_drained("decode-1", 30.1)
    world.ready("decode-1", now_s=30.2)
    assert world.launcher.take() == []


def test_nothing_is_started_once_closed() -> None:
    world = World()
    world.ready("decode-1")
    world.launcher.take()
    world.controller.close()
    world.controller.on_dead("decode-1", "killed", 30.0)
    assert world.launcher.take() == ["kill decode-1"]


@pytest.mark.parametrize("size", [-1, 1025])
def test_sizes_out_of_range_change_nothing(size: int) -> None:
    world = World()
    with pytest.raises(ValueError, match=rf"decode must be in \[0, 1024\], got {size}"):
        world.controller.set_targets({"prefill": 3, "decode": size}, 1.0)
    assert [pool.target for pool in world.controller.pools(1.0)] == [1, 1]


def test_pools_name_every_worker_and_its_phase() -> None:
    world = World(decode=2)
    world.ready("decode-1")
    world.launcher.shortage = "waiting for 1 CPU: the cluster has 2, 0 of them free"
    decode = world.controller.pools(1.0)[1]
    assert decode.role == common_pb2.WORKER_ROLE_DECODE
    assert (decode.target, decode.ready) == (2, 1)
    assert [w.worker_id for w in decode.workers] == ["id-decode-1", "decode-2"]
    assert [w.phase for w in decode.workers] == [
        common_pb2.WORKER_PHASE_READY,
        common_pb2.WORKER_PHASE_STARTING,
    ]
    assert "waiting for 1 CPU: the cluster has 2, 0 of them free" in decode.message


def test_states_go_forwards_only() -> None:
    ways = {(a, b) for a in WorkerState for b in WorkerState if _may(a, b)}
    starting, ready, draining, dead = WorkerState
    assert ways == {
        (starting, ready),
        (starting, dead),
        (ready, draining),
        (ready, dead),
        (draining, dead),
    }


def _may(state: WorkerState, following: WorkerState) -> bool:
    try:
        return state.to(following) is following
    except ValueError:
        return False


def test_a_worker_that_is_told_to_end_drains_and_is_replaced_at_once() -> None:
    world = World(prefill=1, decode=2)
    world.ready("prefill-1", "decode-1", "decode-2", now_s=1.0)
    world.launcher.take()
    world.controller.on_leaving("decode-1", 2.0)
    assert world.ids() == ["id-prefill-1", "id-decode-1 draining", "id-decode-2"]
    assert world.launcher.take() == ["drain decode-1", "start decode-3"]
    world.controller.on_leaving("decode-1", 2.1)  # told twice
    assert world.launcher.take() == []
    world.controller.on_drained("decode-1", 3.0)
    assert world.ids() == ["id-prefill-1", "id-decode-2"]
    assert world.launcher.take() == ["kill decode-1"]
    world.controller.on_leaving("decode-1", 3.1)  # old news
    assert world.launcher.take() == []


def test_one_that_was_told_to_end_and_is_gone_before_it_had_drained_is_no_failed_start() -> None:
    world = World()
    world.ready("prefill-1", "decode-1", now_s=1.0)
    world.controller.on_leaving("decode-1", 1.5)
    world.launcher.take()
    world.controller.on_dead("decode-1", "its process ended", 2.0)
    assert world.launcher.take() == ["kill decode-1"]
    assert world.controller.pools(2.0)[1].message == "0 of 1 ready; 1 starting"
