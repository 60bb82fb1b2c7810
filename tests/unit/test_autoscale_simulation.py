"""The autoscaler under random workloads in virtual time: it settles, and it does not swing."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from itertools import pairwise

from scaling_world import Load, Machine, ScalingWorld

from legato.cluster.autoscale_options import AutoscaleOptions, PoolRange

OPTIONS = AutoscaleOptions(PoolRange(1, 8), PoolRange(1, 8), ttft_slo_s=1.0, itl_slo_s=0.05)
NUM_WORKLOADS = 200 if os.environ.get("LEGATO_SIMULATION") == "full" else 8
PHASE_S = 240.0  # of one load; then comes another, from nothing to forty times as much at once
SETTLED_S = 80.0  # the end of a phase, in which the goals must be met
MAX_CHANGES = 4  # of a pool within a minute: the cool-down is 15 s


@dataclass
class Outcome:
    attainable: int = 0  # phases whose load half of the greatest pools could serve
    missed: int = 0  # of these, those that ended with a goal missed
    changes: int = 0
    most_a_minute: int = 0
    reversals: int = (
        0  # a pool changed its direction within a phase: an overshoot taken back is one
    )
    swings: int = 0  # it did so more than twice


def attainable(load: Load, machine: Machine) -> bool:
    """With half of eight workers each, so that a backlog can be worked off."""
    tokens_per_s = load.requests_per_s * load.answer_tokens / OPTIONS.decode.max_workers
    prompts_s = load.requests_per_s * load.prompt_tokens / machine.prefill_tokens_per_s
    if tokens_per_s * machine.sequence_s > 0.5:
        return False
    batch = tokens_per_s * machine.step_s / (1 - tokens_per_s * machine.sequence_s)
    fill = batch * (load.prompt_tokens + load.answer_tokens) / 16 / machine.decode_blocks
    return (
        prompts_s <= OPTIONS.prefill.max_workers / 2
        and machine.itl_s(batch) <= 0.6 * OPTIONS.itl_slo_s
        and fill <= 0.4
    )


def run(seed: int, outcome: Outcome) -> None:
    dice = random.Random(seed)
    machine = Machine(
        prefill_tokens_per_s=dice.choice((1500.0, 3000.0, 10_000.0)),
        decode_blocks=dice.choice((300, 1000, 4000)),
        start_s=dice.choice((1.0, 3.0, 5.0, 15.0)),
    )
    loads = [
        Load(dice.choice((0, 0.5, 2, 5, 10, 20, 40)), dice.uniform(50, 400), dice.uniform(10, 200))
        for _ in range(4)
    ]
    world = ScalingWorld(OPTIONS, loads[0], machine=machine, seed=seed)
    before = True
    for number, load in enumerate(loads):
        world.load = load
        world.run((number + 1) * PHASE_S)
        now = attainable(load, machine)
        # A load that nobody can serve leaves a backlog to the next.
        if now and before:
            outcome.attainable += 1
            settled_s = world.now_s - SETTLED_S
            ttfts_s = sorted(ttft_s for at_s, ttft_s in world.ttfts if at_s >= settled_s)
            itls_s = [itl_s for at_s, itl_s in world.itls if at_s >= settled_s]
            late = bool(ttfts_s) and ttfts_s[len(ttfts_s) * 9 // 10] > OPTIONS.ttft_slo_s
            slow = bool(itls_s) and sum(itls_s) / len(itls_s) > OPTIONS.itl_slo_s
            outcome.missed += late or slow
        before = now
        for role in ("prefill", "decode"):
            signs = [
                after > earlier
                for at_s, pool, earlier, after in world.changes
                if pool == role and at_s >= world.now_s - PHASE_S
            ]
            turns = sum(a != b for a, b in pairwise(signs))
            outcome.reversals += turns
            outcome.swings += turns > 2
    for role in ("prefill", "decode"):
        times = [at_s for at_s, pool, *_ in world.changes if pool == role]
        most = max((sum(a <= b < a + 60 for b in times) for a in times), default=0)
        outcome.most_a_minute = max(outcome.most_a_minute, most)
    outcome.changes += len(world.changes)


def test_random_workloads_settle_within_the_goals_and_do_not_swing() -> None:
    outcome = Outcome()
    for seed in range(NUM_WORKLOADS):
        run(seed, outcome)
    print(NUM_WORKLOADS, "workloads:", outcome)
    assert outcome.attainable >= NUM_WORKLOADS, "the workloads are too heavy to say anything"
    assert outcome.changes >= NUM_WORKLOADS
    assert outcome.most_a_minute <= MAX_CHANGES
    # Random arrivals are at times more than usual for a minute.
    assert outcome.missed <= outcome.attainable // 50
    assert outcome.swings <= NUM_WORKLOADS // 20
    assert outcome.reversals <= 2 * NUM_WORKLOADS


def test_a_step_of_load_is_met_in_bounded_time_and_its_end_shrinks_by_drain() -> None:
    world = ScalingWorld(OPTIONS, Load(1), seed=3)
    world.run(60)
    assert world.changes == []
    world.load = Load(20)
    world.run(60 + 180)
    settled = [ttft_s for at_s, ttft_s in world.ttfts if at_s >= 200]
    assert sorted(settled)[len(settled) * 9 // 10] <= OPTIONS.ttft_slo_s
    assert world.size_of("prefill").ready >= 4
    first_s = next(at_s for at_s, *_ in world.changes)
    assert first_s <= 60 + OPTIONS.up_after_s + 3
    world.load = Load(0)
    world.run(240 + OPTIONS.down_after_s + 9 * (OPTIONS.cool_down_s + 2))
    assert (world.size_of("prefill").target, world.size_of("decode").target) == (1, 1)
    assert world.num_moved == 0, "workers that went had finished what they had"
    assert len(world.prefills) == len(world.decodes) == 1


def test_starts_that_fail_are_not_asked_for_by_the_dozen() -> None:
    world = ScalingWorld(
        OPTIONS, Load(10), fails=lambda name: name not in ("prefill-1", "decode-1")
    )
    world.run(600)
    assert world.size_of("prefill").target == 2
    assert world.size_of("prefill").ready == 1
    # As the controller's own back-off has it: three, then one each 30 s, in each pool.
    assert world.num_starts <= 2 * (3 + 600 / 30)
    world.load = Load(0)
    world.run(1200)
    assert world.size_of("prefill").target == 1


def test_a_dry_run_leaves_the_pools_alone() -> None:
    world = ScalingWorld(replace(OPTIONS, dry_run=True), Load(20), seed=1)
    world.run(120)
    assert world.changes == []
    assert any(d.text.startswith("dry run: ") for d in world.loop.status(120).decisions)
