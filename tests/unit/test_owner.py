"""The owner's loop over a RayService of canned answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from legato.cluster.config import RouterOptions, ServiceConfig
from legato.cluster.errors import ServiceError
from legato.cluster.node_fit import NodeView
from legato.cluster.owner import DRAIN_S, Owner
from legato.cluster.placement import ClusterFacts
from legato.cluster.router_ports import router_ports
from legato.cluster.stop_signal import StopSignal

if TYPE_CHECKING:
    from collections.abc import Iterator


class Quiet:
    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def amount(self, text: str, done: int, total: int) -> None:
        pass

    def state(self, text: str) -> None:
        pass


class CannedRay:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.reason = ""
        self.news: list[str] = []
        self.head_lost = False
        self.told: list[int] = []  # to whom waits for the end
        self.num_running = 0  # when the drain is over
        self.num_tended = 0
        self.asked: float | None = None
        self.never_done = False
        self.on_wait: Any = None

    def failure(self) -> str:
        return self.reason

    def tend(self) -> list[str]:
        self.num_tended += 1
        news, self.news = self.news, []
        return news

    def end_asked(self) -> float | None:
        asked, self.asked = self.asked, None
        return asked

    def begin_drain(self, drain_timeout_s: float) -> list[str]:
        self.log.append(f"drain {drain_timeout_s:g}")
        return ["drain"]

    def num_cut(self, calls: list[str]) -> int:
        assert calls == ["drain"]
        return self.num_running

    def begin_stop(self, num_cut: int) -> list[str]:
        self.told.append(num_cut)
        self.log.append("stop workers")
        return ["stop"]

    def done(self, calls: list[str], timeout_s: float) -> bool:
        if self.on_wait is not None:
            self.on_wait()
        return not self.never_done

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    with StopSignal() as handler:
        yield handler


@pytest.fixture
def ray() -> CannedRay:
    return CannedRay()


@pytest.fixture
def owner(stop: StopSignal, ray: CannedRay) -> Owner:
    owner = Owner(ServiceConfig(model="m"), Quiet(), stop)
    owner._ray = ray  # type: ignore[assignment]  # stands in for RayService
    return owner


def test_a_shutdown_that_was_asked_for_brings_its_drain(owner: Owner, ray: CannedRay) -> None:
    ray.asked = 3.0
    assert owner.wait() == 3.0
    owner.end(3.0)
    assert ray.log == ["drain 3", "stop workers", "close"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_wait(owner: Owner, number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    assert owner.wait() == DRAIN_S
    assert owner.stop_asked


def test_a_dead_router_ends_the_service_with_the_reason(owner: Owner, ray: CannedRay) -> None:
    ray.reason = "the router ended: killed"
    with pytest.raises(ServiceError, match="the router ended: killed; ending the service"):
        owner.wait()
    owner.end(None)
    assert ray.log == ["close"]


def test_what_was_started_again_is_told_and_the_service_goes_on(
    stop: StopSignal, ray: CannedRay
) -> None:
    progress = Quiet()
    owner = Owner(ServiceConfig(model="m"), progress, stop)
    owner._ray = ray  # type: ignore[assignment]  # stands in for RayService
    ray.news = ["router a:1 ended; it is started again"]

    def tend() -> list[str]:
        news, ray.news = ray.news, []
        ray.asked = None if news else 1.0
        return news

    ray.tend = tend  # type: ignore[method-assign]  # the end is asked for after the news
    assert owner.wait() == 1.0
    assert progress.stages == ["router a:1 ended; it is started again"]


def test_the_controller_is_told_of_the_owner_during_the_end_too(
    owner: Owner, ray: CannedRay
) -> None:
    owner.end(1.0)
    assert ray.num_tended >= 2


@pytest.mark.parametrize(
    ("num_running", "told"),
    [
        (0, []),
        (1, ["1 running request was cut after 3 s"]),
        (2, ["2 running requests were cut after 3 s"]),
    ],
)
def test_requests_that_the_end_cuts_are_told(
    stop: StopSignal, ray: CannedRay, num_running: int, told: list[str]
) -> None:
    progress = Quiet()
    owner = Owner(ServiceConfig(model="m"), progress, stop)
    owner._ray = ray  # type: ignore[assignment]  # stands in for RayService
    ray.num_running = num_running
    owner.end(3.0)
    assert progress.stages == told


def test_a_start_is_given_up_at_its_bound_though_the_controller_is_silent(
    stop: StopSignal,
) -> None:
    class Silent(CannedRay):
        """Waits for each answer as long as it may."""

        def start_failure(self, bound_s: float) -> str:
            time.sleep(bound_s)
            return ""

        def pools(self, bound_s: float) -> None:
            time.sleep(bound_s)

        def router_addresses(self) -> list[str]:
            return []

    owner = Owner(ServiceConfig(model="m", start_timeout_s=1.0), Quiet(), stop)
    began_s = time.monotonic()
    with pytest.raises(ServiceError, match="not ready within --start-timeout 1 s: controller "):
        owner._wait_until_ready(Silent(), began_s + 1.0)  # type: ignore[arg-type]  # as above
    assert time.monotonic() - began_s < 4.0  # and not two times five seconds


@pytest.mark.parametrize(
    ("first", "count", "ports"),
    [(50051, 1, [50051]), (50051, 3, [50051, 50052, 50053]), (0, 3, [0]), (65535, 1, [65535])],
)
def test_routers_stand_side_by_side(first: int, count: int, ports: list[int]) -> None:
    config = ServiceConfig(model="m", router=RouterOptions(port=first), num_routers=count)
    assert router_ports(config) == ports


def test_routers_beyond_the_last_port_are_refused() -> None:
    config = ServiceConfig(model="m", router=RouterOptions(port=65534), num_routers=3)
    with pytest.raises(ServiceError, match="--routers 3 needs the ports 65534 to 65536"):
        router_ports(config)


def test_a_taken_port_of_any_router_ends_the_start(stop: StopSignal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ServiceConfig(model="m", router=RouterOptions(port=port - 1), num_routers=2)
        with pytest.raises(ServiceError, match=r"port \d+ on 127.0.0.1 is in use"):
            Owner(config, Quiet(), stop).start()


def test_a_second_signal_hurries(owner: Owner, ray: CannedRay) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    drain_s = owner.wait()
    ray.never_done = True
    ray.on_wait = lambda: os.kill(os.getpid(), signal.SIGINT)
    owner.end(drain_s)
    assert ray.log == [f"drain {DRAIN_S:g}", "drain 0", "stop workers", "close"]


def test_a_second_signal_cuts_at_once_and_says_how_many(stop: StopSignal, ray: CannedRay) -> None:
    progress = Quiet()
    owner = Owner(ServiceConfig(model="m"), progress, stop)
    owner._ray = ray  # type: ignore[assignment]  # stands in for RayService
    ray.never_done, ray.num_running = True, 2

    def hurry() -> None:
        if stop.count < 1:
            os.kill(os.getpid(), signal.SIGINT)
        ray.never_done = "drain 0" not in ray.log

    ray.on_wait = hurry
    began_s = time.monotonic()
    owner.end(30.0)
    assert time.monotonic() - began_s < 3.0
    assert ray.log == ["drain 30", "drain 0", "stop workers", "close"]
    assert progress.stages == ["2 running requests were cut at once"]
    assert ray.told == [2]


def test_the_newest_drain_counts(stop: StopSignal, ray: CannedRay) -> None:
    progress = Quiet()
    owner = Owner(ServiceConfig(model="m"), progress, stop)
    owner._ray = ray  # type: ignore[assignment]  # stands in for RayService
    ray.never_done, ray.num_running = True, 1
    asked = [60.0, 0.5]

    def ask() -> None:
        ray.asked = asked.pop(0) if asked else None
        ray.never_done = "drain 0.5" not in ray.log

    ray.on_wait = ask
    owner.end(3.0)
    assert ray.log == ["drain 3", "drain 60", "drain 0.5", "stop workers", "close"]
    assert progress.stages == ["1 running request was cut after 0.5 s"]


def test_a_drain_that_never_answers_is_given_up(
    owner: Owner, ray: CannedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("legato.cluster.owner.time.monotonic", lambda: now_s[0])

    def wait() -> None:
        now_s[0] += 1.0

    ray.never_done, ray.on_wait = True, wait
    owner.end(2.0)
    assert ray.log == ["drain 2", "stop workers", "close"]
    assert now_s[0] == pytest.approx(2 + 5 + 5, abs=2)


def test_a_ray_that_does_not_end_keeps_neither_the_owner_nor_the_reason() -> None:
    # The end is this process's own, so it is another process's.
    script = """
import time
from legato.cluster import owner
from legato.cluster.cli.service_run import run_service
from legato.cluster.config import RouterOptions, ServiceConfig

class Hangs:
    head_lost = False

    def close(self):
        time.sleep(60)

    def tend(self):
        return []

    def failure(self):
        return "the router ended: killed"

def start(one):
    one._ray = Hangs()
    return "127.0.0.1:1"

owner.CLOSE_TIMEOUT_S = 0.2
owner.Owner.start = start
run_service(ServiceConfig(model="m"), lambda one, address, progress: one.wait())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 1
    # Why it ended is said too: nobody else comes to say it.
    assert ended.stderr.endswith(
        "legato: the router ended: killed; ending the service; "
        "ending Ray did not succeed within 0.2 s\n"
    )


class JoiningNodes:
    """One more node at each look."""

    def __init__(self) -> None:
        self.nodes = [NodeView(str(i), f"10.0.0.{i}:1", {}, {}, {}) for i in range(9)]
        self.num_seen = 1

    def facts_now(self) -> ClusterFacts:
        self.num_seen += 1
        return ClusterFacts(joined=True, nodes=tuple(self.nodes[: self.num_seen]), num_cores=1)


@pytest.mark.parametrize(("wanted", "seen"), [(0, 1), (1, 1), (4, 4)])
def test_the_start_awaits_the_nodes_that_it_was_told_of(
    wanted: int, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("legato.cluster.owner.NODES_POLL_S", 0.0)
    owner = Owner(ServiceConfig(model="m", await_nodes=wanted), Quiet(), StopSignal())
    ray: Any = JoiningNodes()
    first = ClusterFacts(joined=True, nodes=tuple(ray.nodes[:1]), num_cores=1)
    facts = owner._await_nodes(ray, first, time.monotonic() + 10)
    assert len(facts.nodes) == seen
    late = Owner(ServiceConfig(model="m", await_nodes=12), Quiet(), StopSignal())
    with pytest.raises(ServiceError, match=r"1 of 12 nodes have joined .* within 120 s; start"):
        late._await_nodes(ray, first, time.monotonic() - 1)
