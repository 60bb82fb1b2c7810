"""The owner's view of its routers, over calls that end when the test says so; no Ray is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorDiedError, ActorUnavailableError

from legato.cluster.actors import router_group
from legato.cluster.actors.plans import RouterPlan
from legato.cluster.actors.router_actor import RouterPlace
from legato.cluster.actors.router_group import RETURN_TIMEOUT_S, RouterGroup
from legato.cluster.actors.worker_process import WorkerProcess
from legato.cluster.config import RouterOptions
from legato.cluster.heartbeat import SILENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

AWAY = ActorUnavailableError("restarting", None)
PROCESS = WorkerProcess("node", 123, 0.0)


class Call:
    """A reference of Ray's."""

    def __init__(self) -> None:
        self.outcome: Any = None


@dataclass
class Method:
    calls: list[Call] = field(default_factory=list)

    def remote(self, *_: object) -> Call:
        self.calls.append(Call())
        return self.calls[-1]


class Actor:
    def __init__(self) -> None:
        self.place, self.end_asked, self.end = Method(), Method(), Method()

    def serves(self, address: str) -> None:
        self.place.calls[-1].outcome = RouterPlace(address, PROCESS)

    def breaks(self, error: Exception) -> None:
        """As Ray tells all calls that are open."""
        for method in (self.place, self.end_asked):
            if method.calls[-1].outcome is None:
                method.calls[-1].outcome = error


class ActorClass:
    """What makes actors."""

    def __init__(self, made: list[Actor]) -> None:
        self._made = made

    def options(self, **_: object) -> ActorClass:
        return self

    def remote(self, *_: object) -> Actor:
        self._made.append(Actor())
        return self._made[-1]


class FakeRay:
    """As much of the module as the group uses."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []

    def remote(self, _: type) -> ActorClass:
        return ActorClass(self.actors)

    def wait(self, calls: Iterable[Call], timeout: float) -> tuple[list[Call], list[Call]]:
        done = [call for call in calls if call.outcome is not None]
        return done, [call for call in calls if call.outcome is None]

    def get(self, call: Call) -> object:
        if isinstance(call.outcome, Exception):
            raise call.outcome
        return call.outcome


class Beat:
    """A Heartbeat."""

    silent_for_s = 0.0

    def __init__(self, address: str, access: object) -> None:
        self.num_forgiven = 0

    def forgive(self) -> None:
        self.silent_for_s = 0.0

    def stop(self) -> None:
        pass


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_routers: int) -> None:
        self.ray = FakeRay()
        self.ended: list[WorkerProcess] = []
        monkeypatch.setattr(router_group, "ray", self.ray)
        monkeypatch.setattr(router_group, "Heartbeat", Beat)
        monkeypatch.setattr(router_group, "end_process", self.ended.append)
        monkeypatch.setattr(router_group, "outcome", lambda call: "killed")
        plan = RouterPlan(RouterOptions(port=0), num_routers, "m", "m", "0", 1, "here")
        self.group = RouterGroup(None, plan, {})
        self.now_s = 0.0

    def look(self, after_s: float = 1.0) -> list[str]:
        self.now_s += after_s
        return self.group.look(self.now_s)

    def serve(self) -> None:
        for number, actor in enumerate(self.ray.actors, 1):
            assert self.group.addresses() == []
            actor.serves(f"h:{number}")
            assert self.look() == []


def test_one_that_died_is_told_and_told_again_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, 2)
    scene.serve()
    assert scene.group.addresses() == ["h:1", "h:2"]
    lost = scene.ray.actors[1]
    lost.breaks(AWAY)
    assert scene.look() == ["router h:2 ended; it is started again"]
    lost.breaks(AWAY)  # not yet
    assert scene.look() == []
    assert scene.group.failure() == ""
    scene.look()
    lost.serves("h:2")
    assert scene.look() == ["router h:2 serves again"]
    assert scene.group.addresses() == ["h:1", "h:2"]


def test_one_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 1)
    scene.serve()
    heartbeat: Any = scene.group._links[0]._heartbeat
    heartbeat.silent_for_s = SILENCE_S
    assert scene.look() == []
    heartbeat.silent_for_s = SILENCE_S + 0.1
    assert scene.look() == ["router h:1 has not answered for 10 s; it is ended"]
    assert scene.ended == [PROCESS]
    assert scene.look() == []  # once


def test_the_service_ends_where_none_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 2)
    scene.serve()
    for actor in scene.ray.actors:
        actor.breaks(AWAY)
    scene.look()
    scene.look(RETURN_TIMEOUT_S - 1)
    assert scene.group.failure() == ""
    scene.look(2.0)
    assert scene.group.failure() == "no router has served for 60 s"


def test_one_of_two_that_is_gone_for_good_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 2)
    scene.serve()
    scene.ray.actors[0].breaks(ActorDiedError())
    scene.look()
    assert scene.group.failure() == ""
    scene.ray.actors[1].breaks(ActorDiedError())
    scene.look()
    assert scene.group.failure() == "the router ended: killed"


def test_the_end_may_be_asked_for_at_any_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 3)
    scene.serve()
    assert scene.group.end_asked() is None
    scene.ray.actors[2].end_asked.calls[-1].outcome = 0.0
    scene.look()
    assert scene.group.end_asked() == 0.0
