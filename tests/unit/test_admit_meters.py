"""What `admit` goes by: means that follow, and forget."""

from __future__ import annotations

import pytest

from legato.cluster.decaying_mean import DecayingMean
from legato.cluster.flow_meter import FlowMeter
from legato.cluster.prefill_speeds import PrefillSpeeds
from legato.cluster.service_times import ServiceTimes
from legato.protos import common_pb2


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def drain(meter: FlowMeter, clock: Clock, seconds: int, tokens_each_tenth: int) -> None:
    for _ in range(10 * seconds):
        clock.now += 0.1
        meter.note(tokens_each_tenth)


def test_the_drain_is_measured_while_somebody_waits() -> None:
    clock = Clock()
    meter = FlowMeter(clock)
    drain(meter, clock, 5, 1000)  # nobody waits: it tells of no limit
    assert meter.tokens_s() is None
    meter.set_waited(True)
    drain(meter, clock, 20, 50)
    assert meter.tokens_s() == pytest.approx(500, rel=0.05)
    meter.set_waited(False)
    clock.now += 20.0
    assert meter.tokens_s() == pytest.approx(500, rel=0.05)
    clock.now += 11.0
    assert meter.tokens_s() is None


def test_the_drain_follows_and_a_few_tickets_tell_nothing() -> None:
    clock = Clock()
    meter = FlowMeter(clock)
    meter.set_waited(True)
    for _ in range(8):
        clock.now += 0.1
        meter.note(50)
    assert meter.tokens_s() is None
    drain(meter, clock, 10, 50)
    drain(meter, clock, 10, 10)
    assert meter.tokens_s() == pytest.approx(100, rel=0.2)


def test_slow_and_quick_services_are_measured_alike() -> None:
    for interval_s in (0.01, 10.0):
        clock = Clock()
        meter = FlowMeter(clock)
        meter.set_waited(True)
        for turn in range(40):
            clock.now += interval_s
            meter.note(100, batch=turn % 4 == 0)
        assert meter.tokens_s() == pytest.approx(100 / interval_s)
        assert meter.batch_tokens_s() == pytest.approx(25 / interval_s, rel=0.2)


def test_a_drain_that_has_stopped_is_known_as_slow() -> None:
    clock = Clock()
    meter = FlowMeter(clock)
    meter.set_waited(True)
    drain(meter, clock, 5, 50)
    clock.now += 30.0
    rate = meter.tokens_s()
    assert rate is not None
    assert rate < 50


def test_a_ratio_weighs_sums_alike() -> None:
    mean = DecayingMean(0.5, 10.0)
    mean.add(1.0, 10.0, now=0.0)
    mean.add(3.0, 10.0, now=1.0)
    assert mean.value(2.0) == pytest.approx(0.2)
    assert mean.value(12.0) is None
    mean.add(8.0, 2.0, now=20.0)
    assert mean.value(20.0) == pytest.approx(4.0)


def test_an_answer_is_expected_to_get_as_long_as_others_did() -> None:
    clock = Clock()
    times = ServiceTimes(clock)
    assert times.expected_output(4096) == 4096
    for _ in range(100):
        times.note_length(200, 4096)
    assert times.expected_output(4096) == 200
    assert times.expected_output(16) == 16
    for _ in range(100):
        times.note_length(64, 64)
        times.note_length(16, 16)
    assert times.expected_output(64) == 64  # as these clients do
    clock.now += 11.0
    assert times.expected_output(4096) == 4096


def test_times_are_forgotten() -> None:
    clock = Clock()
    times = ServiceTimes(clock)
    times.note_start(0.5)
    times.note_output(20, 1.0)
    times.note_output(0, 5.0)
    assert times.start_s == 0.5
    assert times.output_token_s == pytest.approx(0.05)
    clock.now += 11.0
    assert times.start_s is times.output_token_s is None


def test_a_prefill_worker_is_measured_from_reports_at_which_it_had_prompts() -> None:
    clock = Clock()
    speeds = PrefillSpeeds(clock)

    def report(done: int, *, has_prompts: bool = True) -> None:
        load = common_pb2.WorkerLoad(prefill_tokens=done)
        speeds.note_report("p", load, has_prompts=has_prompts)
        clock.now += 0.05

    report(0, has_prompts=False)
    for done in (100, 100, 100, 100, 100):
        report(done)
    report(700, has_prompts=False)  # its end counts, though nothing is left
    report(700, has_prompts=False)
    assert speeds.tokens_s("p") == pytest.approx(2400, rel=0.02)
    assert speeds.tokens_s("q") is None
    clock.now += 61.0
    assert speeds.tokens_s("p") is None


def test_a_step_of_many_reports_is_no_slow_worker() -> None:
    clock = Clock()
    speeds = PrefillSpeeds(clock)
    done = 0
    for _ in range(20):
        for tick in range(40):  # two seconds
            load = common_pb2.WorkerLoad(prefill_tokens=done)
            speeds.note_report("p", load, has_prompts=True)
            clock.now += 0.05
            speed = speeds.tokens_s("p")
            assert done == 0 or tick < 2 or (speed is not None and speed > 400)
        done += 2000
    assert speed == pytest.approx(1000, rel=0.2)
    speeds.forget("p")
    assert speeds.tokens_s("p") is None
