"""Ray's own start, over a Ray that does what the test says: its patience, and its words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ray._private import worker

from legato.cluster.actors import service
from legato.cluster.actors.hush_ray import hush_ray
from legato.cluster.errors import ServiceError
from legato.cluster.placement import ClusterFacts

if TYPE_CHECKING:
    from collections.abc import Sequence


class SlowRay:
    """`outcomes` of its starts; None: it starts."""

    def __init__(self, *outcomes: str | None) -> None:
        self.outcomes = list(outcomes)
        self.log: list[str] = []

    def init(self, **_: Any) -> None:  # noqa: ANN401
        self.log.append("init")
        if (failure := self.outcomes.pop(0)) is not None:
            raise RuntimeError(failure)

    def shutdown(self) -> None:
        self.log.append("shutdown")


SLOW = "The current node timed out during startup."


@pytest.fixture(autouse=True)
def print_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    facts = ClusterFacts(joined=False, nodes=(), num_cores=1)
    monkeypatch.setattr(service.RayService, "_facts", lambda *_, **__: facts)


@pytest.mark.parametrize(
    ("outcomes", "bound_s", "calls", "told"),
    [
        ((None,), 9.0, ["init"], ""),
        ((SLOW, None), 9.0, ["init", "shutdown", "init"], ""),
        ((SLOW, SLOW), 9.0, ["init", "shutdown", "init"], "so it did once before; the machine may"),
        ((SLOW,), 0.0, ["init", "shutdown"], "startup; the machine may have too much to do: try"),
        (("no such address",), 9.0, ["init"], "Ray could not be started: no such address"),
    ],
)
def test_a_start_that_takes_too_long_is_tried_once_more_within_the_bound(
    monkeypatch: pytest.MonkeyPatch,
    outcomes: Sequence[str | None],
    bound_s: float,
    calls: list[str],
    told: str,
) -> None:
    ray, retries = SlowRay(*outcomes), []
    monkeypatch.setattr(service, "ray", ray)
    one = service.RayService()
    if told:
        with pytest.raises(ServiceError) as raised:
            one.start_own(Path("/nowhere"), 1, bound_s, lambda: retries.append(1))
        assert told in str(raised.value)
    else:
        one.start_own(Path("/nowhere"), 1, bound_s, lambda: retries.append(1))
    assert ray.log == calls
    assert len(retries) == calls.count("init") - 1


def test_rays_lines_stay_out_of_the_services_output(capfd: pytest.CaptureFixture[str]) -> None:
    line = {"lines": ["A worker died or was killed"], "pid": "raylet", "is_err": False}
    hush_ray()
    worker.print_to_stdstream(line, ignore_prefix=False)
    assert capfd.readouterr() == ("", "")
