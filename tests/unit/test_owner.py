"""The owner's loop over a RayService of canned answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from legato.cluster.config import ServiceConfig
from legato.cluster.errors import ServiceError
from legato.cluster.owner import DRAIN_S, Owner, StopSignal

if TYPE_CHECKING:
    from collections.abc import Iterator


class Silent:
    def stage(self, text: str) -> None:
        pass

    def state(self, text: str) -> None:
        pass


class CannedRay:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.reason = ""
        self.asked: float | None = None
        self.never_done = False
        self.on_wait: Any = None

    def failure(self) -> str:
        return self.reason

    def shutdown_asked(self) -> float | None:
        return self.asked

    def begin_drain(self, drain_timeout_s: float) -> str:
        self.log.append(f"drain {drain_timeout_s:g}")
        return "drain"

    def begin_stop(self) -> str:
        self.log.append("stop workers")
        return "stop"

    def done(self, call: str, timeout_s: float) -> bool:
        if self.on_wait is not None:
            self.on_wait()
        return not self.never_done

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    handler = StopSignal()
    handler.install()
    yield handler
    for number, old in zip(numbers, before, strict=True):
        signal.signal(number, old)


@pytest.fixture
def ray() -> CannedRay:
    return CannedRay()


@pytest.fixture
def owner(stop: StopSignal, ray: CannedRay) -> Owner:
    owner = Owner(ServiceConfig(model="m"), Silent(), stop)
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


def test_a_controller_that_answers_late_is_asked_again_until_the_start_s_own_bound(
    stop: StopSignal,
) -> None:
    class Late(CannedRay):
        num_asked = 0

        def hopeless(self) -> str:
            self.num_asked += 1
            if self.num_asked < 3:
                raise TimeoutError
            return "no node has it"

    ray = Late()
    with pytest.raises(ServiceError, match=r"^no node has it$"):
        Owner(ServiceConfig(model="m"), Silent(), stop)._wait_until_ready(ray)  # type: ignore[arg-type]  # stands in
    assert ray.num_asked == 3
    bound = ServiceConfig(model="m", start_timeout_s=0.0)
    told = "not ready within --start-timeout 0 s: the controller has not answered yet"
    with pytest.raises(ServiceError, match=told):
        Owner(bound, Silent(), stop)._wait_until_ready(Late())  # type: ignore[arg-type]  # stands in


def test_a_second_signal_hurries(owner: Owner, ray: CannedRay) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    drain_s = owner.wait()
    ray.never_done = True
    ray.on_wait = lambda: os.kill(os.getpid(), signal.SIGINT)
    owner.end(drain_s)
    assert ray.log == [f"drain {DRAIN_S:g}", "stop workers", "close"]


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
from legato.cluster.cli.serve import run_service
from legato.cluster.config import ServiceConfig

class Hangs:
    def close(self):
        time.sleep(60)

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
