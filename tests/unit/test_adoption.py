"""A controller that takes over from one whose process ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from controller_world import FakeLauncher

from legato.cluster.adoption import ControllerMemory, FoundWorker
from legato.cluster.controller import Controller, StartedWorker
from legato.cluster.pool import ControllerOptions, WorkerState

if TYPE_CHECKING:
    from legato.cluster.control_plane import Role, WorkerEndpoint

OPTIONS = ControllerOptions()
GIVEN: dict[Role, int] = {"prefill": 1, "decode": 1}  # what each process is constructed with
STARTING, READY, DRAINING = WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING


class Life:
    """One process's controller; the next one begins with its memory."""

    def __init__(self, options: ControllerOptions = OPTIONS) -> None:
        self.options = options
        self.launcher = FakeLauncher()
        self.published: list[tuple[WorkerEndpoint, ...]] = []
        self.memories: list[ControllerMemory] = []
        self.controller = Controller(
            self.launcher, self.published.append, GIVEN, options, self.memories.append
        )

    def ready(self, *names: str) -> None:
        for name in names:
            self.controller.on_ready(name, started(name), 1.0)

    def next(self, *found: FoundWorker) -> Life:
        """As kept: through JSON."""
        memory = ControllerMemory.from_json(json.loads(json.dumps(self.memories[-1].to_json())))
        assert memory == self.memories[-1]
        other = Life(self.options)
        other.controller.adopt(memory, found, 100.0)
        return other

    def ids(self) -> list[str]:
        return [f"{w.worker_id}{' draining' * w.draining}" for w in self.published[-1]]


def started(name: str) -> StartedWorker:
    return StartedWorker(f"id-{name}", "127.0.0.1:1", 100, "here")


def serving(name: str, *, draining: bool = False) -> FoundWorker:
    return FoundWorker(name, answered=True, started=started(name), draining=draining)


def test_what_serves_is_taken_over_and_nothing_is_started_twice() -> None:
    first = Life()
    first.controller.set_targets({"decode": 3}, 0.0)
    first.ready("prefill-1", "decode-1", "decode-2", "decode-3")
    second = first.next(*map(serving, ("decode-3", "decode-1", "prefill-1", "decode-2")))
    assert len(second.published) == 1, "a part of the list would have routers drop the rest"
    assert second.ids() == ["id-prefill-1", "id-decode-1", "id-decode-2", "id-decode-3"]
    second.controller.step(100.0)
    names = ("prefill-1", "decode-1", "decode-2", "decode-3")
    assert second.launcher.take() == [f"adopt {name}" for name in names]
    assert [p.target for p in second.controller.pools(100.0)] == [1, 3]


def test_the_dead_are_replaced_at_once_under_names_that_nobody_had() -> None:
    first = Life()
    first.controller.step(0.0)
    first.ready("prefill-1", "decode-1")
    first.controller.on_dead("decode-1", "killed", 50.0)  # decode-2 begins to start
    second = first.next(serving("prefill-1"))  # and has died since
    second.controller.step(100.0)
    assert second.launcher.take() == ["adopt prefill-1", "start decode-3"]


def test_the_death_of_a_worker_taken_over_is_no_failed_start() -> None:
    first = Life()
    first.controller.step(0.0)
    first.ready("prefill-1", "decode-1")
    second = first.next(serving("prefill-1"), serving("decode-1"))
    second.launcher.take()
    second.controller.on_dead("decode-1", "killed", 100.1)
    assert second.launcher.take() == ["kill decode-1", "start decode-2"]


@pytest.mark.parametrize("answered", [True, False])
def test_one_that_was_starting_goes_on_doing_so(answered: bool) -> None:
    first = Life()
    first.controller.step(0.0)
    first.ready("prefill-1")
    second = first.next(serving("prefill-1"), FoundWorker("decode-1", answered=answered))
    second.controller.step(100.0)
    assert second.launcher.take() == ["adopt prefill-1", "adopt decode-1"]
    assert second.ids() == ["id-prefill-1"]
    second.ready("decode-1")
    assert second.ids() == ["id-prefill-1", "id-decode-1"]


def test_one_that_became_ready_meanwhile_is_ready() -> None:
    first = Life()
    first.controller.step(0.0)
    second = first.next(serving("prefill-1"), serving("decode-1"))
    assert second.ids() == ["id-prefill-1", "id-decode-1"]


def test_one_that_served_and_is_mute_is_ended_and_replaced() -> None:
    first = Life()
    first.controller.step(0.0)
    first.ready("prefill-1", "decode-1")
    second = first.next(serving("prefill-1"), FoundWorker("decode-1", answered=False))
    second.controller.step(100.0)
    assert second.launcher.take() == ["adopt prefill-1", "kill decode-1", "start decode-2"]
    assert second.ids() == ["id-prefill-1"]


def test_one_whose_end_was_decided_is_ended() -> None:
    first = Life()
    first.controller.step(0.0)
    first.ready("prefill-1", "decode-1")
    first.controller.report_lost("id-decode-1", "silent", 50.0)
    second = first.next(serving("prefill-1"), serving("decode-1"), serving("decode-2"))
    assert second.launcher.take() == ["adopt prefill-1", "adopt decode-2", "kill decode-1"]
    assert second.ids() == ["id-prefill-1", "id-decode-2"]


@pytest.mark.parametrize("worker_says", [True, False])
def test_a_drain_goes_on(worker_says: bool) -> None:
    first = Life()
    first.controller.step(0.0)
    first.ready("prefill-1", "decode-1")
    if not worker_says:  # the first process ended before it could tell the worker
        first.controller.set_targets({"decode": 0}, 50.0)
    second = first.next(serving("prefill-1"), serving("decode-1", draining=worker_says))
    log = second.launcher.take()
    assert log == ["adopt prefill-1", "adopt decode-1", "drain decode-1"]
    assert second.ids() == ["id-prefill-1", "id-decode-1 draining"]
    second.controller.on_drained("decode-1", 101.0)
    assert second.ids() == ["id-prefill-1"]


def test_it_is_remembered_before_the_launcher_is_told() -> None:
    order: list[str] = []

    class Launcher(FakeLauncher):
        def start(self, name: str, role: Role) -> None:
            order.append(name)

        def kill(self, name: str) -> None:
            order.append(f"kill {name}")

    def remember(memory: ControllerMemory) -> None:
        order.append(",".join(memory.workers) or "nobody")

    controller = Controller(Launcher(), lambda _: None, {"prefill": 0, "decode": 1}, None, remember)
    controller.step(0.0)
    assert order == ["nobody", "decode-1", "decode-1"]
    order.clear()
    controller.set_targets({"decode": 0}, 1.0)
    assert order[-2:] == ["nobody", "kill decode-1"]


def test_an_end_that_had_begun_is_not_undone() -> None:
    first = Life()
    first.controller.step(0.0)
    first.ready("prefill-1", "decode-1")
    first.controller.close()
    second = first.next(serving("prefill-1"))
    second.controller.step(100.0)
    assert second.launcher.take() == ["adopt prefill-1"]


def test_nothing_is_started_while_held_and_the_pools_say_why() -> None:
    life = Life()
    life.controller.hold("the head is gone")
    life.controller.step(0.0)
    assert life.launcher.take() == []
    assert "the head is gone" in life.controller.pools(0.0)[0].message
    life.controller.hold("")
    life.controller.step(1.0)
    assert life.launcher.take() == ["start prefill-1", "start decode-1"]


def test_one_whose_role_was_changed_is_known_by_its_new_name() -> None:
    first = Life()
    first.controller.set_targets({"decode": 2}, 0.0)
    first.ready("prefill-1", "decode-1", "decode-2")
    first.controller.change_role("id-decode-2", "prefill", 2.0)
    first.controller.on_drained("decode-2", 3.0)
    first.ready("prefill-2")
    names = ("prefill-1", "prefill-2", "decode-1")
    second = first.next(*map(serving, names))
    second.controller.step(100.0)
    assert second.launcher.take() == [f"adopt {name}" for name in names]
    assert [p.target for p in second.controller.pools(100.0)] == [2, 1]


def test_one_that_drains_for_another_role_is_let_go_and_the_other_pool_starts_one() -> None:
    first = Life()
    first.controller.set_targets({"decode": 2}, 0.0)
    first.ready("prefill-1", "decode-1", "decode-2")
    first.controller.change_role("id-decode-2", "prefill", 2.0)
    names = ("prefill-1", "decode-1", "decode-2")
    second = first.next(*map(serving, names[:2]), serving("decode-2", draining=True))
    second.controller.step(100.0)
    taken = second.launcher.take()
    assert taken == [*(f"adopt {name}" for name in names), "drain decode-2", "start prefill-2"]


def test_what_was_lost_and_is_not_to_be_replaced_stays_so() -> None:
    first = Life(ControllerOptions(restart=False))
    first.controller.step(0.0)
    first.ready("prefill-1", "decode-1")
    first.controller.on_dead("decode-1", "killed", 50.0)
    second = first.next(serving("prefill-1"))
    second.controller.step(100.0)
    assert second.launcher.take() == ["adopt prefill-1"]
