"""When a need is believed: holds, cool-down, ranges, workers on their way, flips, dry run."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from legato.cluster.autoscale_loop import AutoscaleLoop
from legato.cluster.autoscale_options import AutoscaleOptions, PoolRange
from legato.cluster.autoscaler import Autoscaler
from legato.cluster.load_window import WindowFigures
from legato.cluster.pool_pressure import DecodePressure, PoolSize, PrefillPressure
from legato.cluster.router_load import RouterLoad, WorkerFigures
from legato.cluster.scaling_decision import Flip, Resize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.cluster.control_plane import Role
    from legato.cluster.scaling_decision import Decision

OPTIONS = AutoscaleOptions(
    PoolRange(1, 8), PoolRange(1, 8), up_after_s=3.0, down_after_s=60.0, cool_down_s=15.0
)
START_S = 4.0


class Scene:
    """Pools that follow the decisions, each start taking START_S; looked at once a second.

    `prompts` wait for prefill, whose workers compute 1,000 tokens/s; `fill` is decode's, of 100
    blocks a worker.
    """

    def __init__(self, options: AutoscaleOptions = OPTIONS, *, can_flip: bool = False) -> None:
        self.scaler = Autoscaler(options, 0.0, can_flip=can_flip)
        self.now_s = 0.0
        self.targets: dict[Role, int] = {"prefill": 1, "decode": 1}
        self.ready: dict[Role, int] = {"prefill": 1, "decode": 1}
        self.starting: dict[Role, list[float]] = {"prefill": [], "decode": []}
        self.prompts, self.busy, self.blocks = 0, 0.0, 0
        self.starts = True  # or they never become ready
        self.log: list[tuple[float, str]] = []
        self.decisions: list[Decision] = []

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 1.0
            for role, ends in self.starting.items():
                arrived = [at_s for at_s in ends if at_s <= self.now_s and self.starts]
                self.ready[role] += len(arrived)
                self.starting[role] = [at_s for at_s in ends if at_s not in arrived]
            for decision in self.scaler.step(self._prefill(), self._decode(), self.now_s):
                self._carry_out(decision)

    def size(self, role: Role) -> PoolSize:
        return PoolSize(self.targets[role], self.ready[role], len(self.starting[role]))

    def _prefill(self) -> PrefillPressure:
        size = self.size("prefill")
        return PrefillPressure(
            size, waiting_tokens=self.prompts, worker_tokens_per_s=1000.0,
            busy_workers=min(self.busy, size.ready), idlest="p",
        )  # fmt: skip

    def _decode(self) -> DecodePressure:
        size = self.size("decode")
        return DecodePressure(
            size, used_blocks=self.blocks, total_blocks=100 * size.ready, idlest="d"
        )

    def _carry_out(self, decision: Decision) -> None:
        self.decisions.append(decision)
        text = str(decision)
        self.log.append((self.now_s, text.partition(":")[0]))
        _, _, reason = text.partition(": ")
        assert "\n" not in text
        assert any(character.isdigit() for character in reason), text
        if isinstance(decision, Flip):
            other: Role = "prefill" if decision.to == "decode" else "decode"
            for role, change in ((decision.to, 1), (other, -1)):
                self.targets[role] += change
                self.ready[role] += change
            return
        role = decision.role
        assert self.targets[role] == decision.before != decision.after
        self.targets[role] = decision.after
        missing = decision.after - self.ready[role] - len(self.starting[role])
        self.starting[role] += [self.now_s + START_S] * max(0, missing)
        for _ in range(max(0, -missing)):
            if self.starting[role]:
                self.starting[role].pop()
            else:
                self.ready[role] -= 1


def test_a_need_must_hold_before_it_is_believed() -> None:
    scene = Scene()
    scene.run(30)
    for _ in range(20):  # bursts of two seconds
        scene.prompts = 5000
        scene.run(2)
        scene.prompts = 0
        scene.run(3)
    assert scene.log == []
    scene.prompts, began_s = 5000, scene.now_s
    scene.run(5)
    assert scene.log == [(began_s + 4, "prefill 1 -> 2")]


def test_it_grows_to_the_least_that_was_needed_meanwhile() -> None:
    scene = Scene()
    scene.targets["prefill"] = scene.ready["prefill"] = 4
    scene.run(30)
    scene.busy = 4.0
    for prompts in (90_000, 90_000, 5_000, 90_000):
        scene.prompts = prompts
        scene.run(1)
    assert scene.log == [(34.0, "prefill 4 -> 6")]  # 4 / 0.8 + 5,000 / 10,000, and not 8


def test_workers_that_start_are_waited_for_and_then_the_cool_down() -> None:
    scene = Scene()
    scene.run(30)
    scene.prompts, scene.busy = 1_000_000, 100.0
    scene.run(100)
    times = [at_s for at_s, _ in scene.log]
    assert [text for _, text in scene.log] == ["prefill 1 -> 2", "prefill 2 -> 4", "prefill 4 -> 8"]
    assert [b - a for a, b in pairwise(times)] == [START_S + OPTIONS.cool_down_s] * 2


def test_starts_that_fail_do_not_run_away_and_are_given_up_when_the_need_ends() -> None:
    scene = Scene()
    scene.run(30)
    scene.starts = False
    scene.prompts, scene.busy = 1_000_000, 100.0
    scene.run(600)
    assert [text for _, text in scene.log] == ["prefill 1 -> 2"]
    scene.prompts, scene.busy = 0, 0.0
    scene.run(59)
    assert len(scene.log) == 1
    scene.run(3)
    assert [text for _, text in scene.log[1:]] == ["prefill 2 -> 1"]
    assert "1 of 2 ready, 1 starting, and no more are needed" in str(scene.decisions[-1])


def test_it_shrinks_one_by_one_to_the_least_once_that_has_long_been_enough() -> None:
    scene = Scene()
    scene.targets["decode"] = scene.ready["decode"] = 4
    scene.blocks = 300
    scene.run(100)
    assert scene.log == []
    scene.blocks = 0
    scene.run(59)
    assert scene.log == []
    scene.run(200)
    times = [at_s for at_s, _ in scene.log]
    assert [text for _, text in scene.log] == ["decode 4 -> 3", "decode 3 -> 2", "decode 2 -> 1"]
    assert times[0] >= 160
    assert all(b - a >= OPTIONS.cool_down_s for a, b in pairwise(times))


def test_one_busy_moment_keeps_the_pool_for_as_long_again() -> None:
    scene = Scene()
    scene.targets["decode"] = scene.ready["decode"] = 2
    for _ in range(10):
        scene.blocks = 0
        scene.run(50)
        scene.blocks = 120  # 60 %: not more than it has, not enough for one
        scene.run(1)
    assert scene.log == []


@pytest.mark.parametrize("seed", range(20))
def test_noise_about_a_threshold_does_not_flap(seed: int) -> None:
    dice = random.Random(seed)
    scene = Scene()
    scene.targets = {"prefill": 2, "decode": 2}
    scene.ready = {"prefill": 2, "decode": 2}
    for _ in range(1800):
        scene.prompts = int(dice.gauss(500, 250))  # 500 is half of the goal
        scene.busy = dice.gauss(1.2, 0.1)
        scene.blocks = int(dice.gauss(170, 10))  # 85 %
        scene.run(1)
    for role in ("prefill", "decode"):
        texts = [text for _, text in scene.log if text.startswith(role)]
        steps = [f"{role} 2 -> 3", f"{role} 3 -> 4", f"{role} 4 -> 5"]
        assert texts == steps[: len(texts)], "in half an hour a few steps up, and none back"


def test_ranges_bound_both_ways() -> None:
    scene = Scene(replace(OPTIONS, prefill=PoolRange(1, 3), decode=PoolRange(2, 8)))
    scene.targets["decode"] = scene.ready["decode"] = 3
    scene.prompts, scene.busy = 1_000_000, 100.0
    scene.run(600)
    assert scene.targets == {"prefill": 3, "decode": 2}


def test_after_a_pause_it_begins_anew() -> None:
    scene = Scene()
    scene.targets["decode"] = scene.ready["decode"] = 2
    scene.run(59)
    scene.now_s += 30  # nobody told the load
    scene.run(59)
    assert scene.log == []
    scene.run(2)
    assert [text for _, text in scene.log] == ["decode 2 -> 1"]


def test_a_warm_worker_is_flipped_before_one_is_started() -> None:
    scene = Scene(can_flip=True)
    scene.targets["decode"] = scene.ready["decode"] = 3
    scene.blocks = 90  # two would do
    scene.run(30)
    scene.prompts, scene.busy = 1_000_000, 100.0
    scene.run(60)
    first, *rest = scene.decisions
    assert isinstance(first, Flip)
    assert (first.worker_id, first.to, first.target) == ("d", "prefill", 2)
    assert "decode can spare one: 30 % of 300 KV blocks needed" in first.reason
    # Then decode has none to spare, and prefill starts its own.
    assert all(isinstance(one, Resize) and one.role == "prefill" for one in rest)
    assert rest
    assert scene.targets["decode"] == 2


def test_no_worker_is_flipped_from_a_pool_at_its_least_or_from_one_that_just_changed() -> None:
    scene = Scene(replace(OPTIONS, decode=PoolRange(3, 8)), can_flip=True)
    scene.targets["decode"] = scene.ready["decode"] = 3
    scene.run(30)
    scene.prompts, scene.busy = 1_000_000, 100.0
    scene.run(30)
    assert not any(isinstance(one, Flip) for one in scene.decisions)
    assert scene.targets["prefill"] > 1

    scene = Scene(can_flip=True)
    scene.targets["decode"] = scene.ready["decode"] = 3
    scene.run(30)
    scene.scaler.note_order("decode", scene.now_s)
    scene.prompts, scene.busy = 1_000_000, 100.0
    scene.run(10)
    assert [type(one) for one in scene.decisions] == [Resize]


# --- the loop around it --------------------------------------------------------------------------


class FakePools:
    """Workers are there as soon as they are asked for."""

    def __init__(self) -> None:
        self.targets: dict[Role, int] = {"prefill": 1, "decode": 2}
        self.asked: list[Mapping[Role, int]] = []

    def size_of(self, role: Role) -> PoolSize:
        return PoolSize(self.targets[role], self.targets[role])

    def ready_ids(self, role: Role) -> tuple[str, ...]:
        return tuple(f"{role}-{index}" for index in range(self.targets[role]))

    def set_targets(self, targets: Mapping[Role, int], now_s: float) -> dict[Role, int]:
        self.asked.append(dict(targets))
        self.targets.update(targets)
        return dict(self.targets)


def tell(loop: AutoscaleLoop, pools: FakePools, first_s: int, last_s: int, waiting: int) -> None:
    """Prefill computes 1,000 tokens/s all the time, and so many tokens wait; decode is idle."""
    for second in range(first_s, last_s):
        prefills = [
            WorkerFigures(name, "prefill", 0, 0, 0, 0, 1000 * second, float(second))
            for name in pools.ready_ids("prefill")
        ]
        decodes = [
            WorkerFigures(name, "decode", 0, 100, 5 + index, 0)
            for index, name in enumerate(pools.ready_ids("decode"))
        ]
        load = RouterLoad(
            "r", WindowFigures(), queued_for_prefill=1, queued_prefill_tokens=waiting,
            workers=(*prefills, *decodes),
        )  # fmt: skip
        loop.note_load(load, float(second))
        for part in range(5):
            loop.step(second + part / 5)


def test_decisions_are_carried_out_logged_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pools = FakePools()
    loop = AutoscaleLoop(replace(OPTIONS, decode=PoolRange(2, 4)), pools, 0.0)
    assert [pool.needed for pool in loop.status(0.0).pools] == [0, 0]
    tell(loop, pools, 0, 30, 5200)
    assert pools.asked == [{"prefill": 2}]
    line = (
        "prefill 1 -> 2: 5,200 prompt tokens wait, 1,000 tokens/s measured: 5.2 s, "
        "above half of the TTFT goal of 500 ms"
    )
    assert [r.getMessage() for r in caplog.records] == [f"autoscale: {line}"]
    status = loop.status(30.0)
    [decision] = status.decisions
    assert decision.text == line
    assert 10 < decision.age_s < 20
    assert not status.dry_run
    assert [(p.min_workers, p.max_workers, p.needed) for p in status.pools] == [
        (1, 8, 4),
        (2, 4, 2),
    ]
    tell(loop, pools, 30, 3000, 0)
    loads = len(loop.status(3000.0).decisions)
    assert loads <= 50


def test_a_dry_run_decides_again_and_again_and_changes_nothing() -> None:
    pools = FakePools()
    loop = AutoscaleLoop(replace(OPTIONS, dry_run=True), pools, 0.0)
    tell(loop, pools, 0, 100, 5200)
    assert pools.asked == []
    texts = [decision.text for decision in loop.status(100.0).decisions]
    assert 5 <= len(texts) <= 10
    assert {text.partition(": 5,200")[0] for text in texts if "prefill" in text} == {
        "dry run: prefill 1 -> 2"
    }
    loop.scale_by_hand({"prefill": 100}, 100.0)  # the operator's alone
    assert pools.targets["prefill"] == 100


def test_flips_go_to_whom_they_are_given() -> None:
    pools = FakePools()
    flips: list[tuple[str, Role]] = []

    def change_role(worker_id: str, role: Role) -> None:
        flips.append((worker_id, role))
        pools.targets = {"prefill": 2, "decode": 1}

    loop = AutoscaleLoop(OPTIONS, pools, 0.0, change_role)
    tell(loop, pools, 0, 25, 5200)
    assert flips == [("decode-0", "prefill")]  # the one with least in it
    assert pools.asked == []
    [decision] = loop.status(25.0).decisions
    assert decision.text.startswith("prefill 1 -> 2 by decode-0: 5,200 prompt tokens wait")


def test_an_operators_target_stands_until_its_own_hold_has_passed() -> None:
    pools = FakePools()
    loop = AutoscaleLoop(OPTIONS, pools, 0.0)
    tell(loop, pools, 0, 50, 0)
    with pytest.raises(ValueError, match=r"prefill is 9, limit \[1, 8\]: the prefill"):
        loop.scale_by_hand({"prefill": 9, "decode": 3}, 50.0)
    assert pools.asked == []
    assert loop.scale_by_hand({"decode": 5}, 50.0) == {"prefill": 1, "decode": 5}
    tell(loop, pools, 50, 110, 0)
    assert pools.asked == [{"decode": 5}]
    tell(loop, pools, 110, 115, 0)
    assert pools.asked[1:] == [{"decode": 4}]


def test_without_a_report_nothing_is_judged() -> None:
    pools = FakePools()
    loop = AutoscaleLoop(OPTIONS, pools, 0.0)
    for second in range(300):
        loop.step(float(second))
    assert pools.asked == []
    assert not loop.status(300.0).decisions
