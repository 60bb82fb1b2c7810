"""PhaseClock: phases without a gap."""

from __future__ import annotations

from legato.cluster.timings import Phase, PhaseClock
from legato.protos import generation_pb2


def test_phases_sum_to_the_total_to_the_last_bit() -> None:
    moments = iter([0.1, 0.3, 0.7, 0.8, 1.1, 1.3, 1.9, 2.3])
    clock = PhaseClock(lambda: next(moments))
    clock.enter(Phase.TICKET)
    clock.enter(Phase.PREFILL)
    clock.mark_first_token()
    clock.enter(Phase.QUEUE)  # moved: the same phases again
    clock.enter(Phase.DECODE)
    clock.enter(Phase.DELIVERY)
    timings = generation_pb2.Timings()
    clock.write_to(timings)
    phases = [getattr(timings, phase.value) for phase in Phase]
    assert sum(phases) == timings.total_s
    assert [round(value, 9) for value in phases] == [0.4, 0.4, 0.4, 0.0, 0.6, 0.4]
    assert round(timings.total_s, 9) == 2.2
    assert round(timings.ttft_s, 9) == 0.7


def test_only_the_first_of_the_first_tokens_counts() -> None:
    moments = iter([0.0, 1.0, 5.0, 6.0])
    clock = PhaseClock(lambda: next(moments))
    clock.mark_first_token()
    clock.mark_first_token()
    timings = generation_pb2.Timings()
    clock.write_to(timings)
    assert timings.ttft_s == 1.0


def test_a_copy_shares_the_past_and_nothing_else() -> None:
    moments = iter([0.0, 1.0, 3.0, 4.0, 6.0])
    clock = PhaseClock(lambda: next(moments))
    clock.enter(Phase.PREFILL)
    twin = clock.copy()
    clock.enter(Phase.DECODE)
    timings, of_twin = generation_pb2.Timings(), generation_pb2.Timings()
    clock.write_to(timings)
    assert not twin.closed
    twin.write_to(of_twin)
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (1.0, 2.0, 1.0)
    assert (of_twin.queue_s, of_twin.prefill_s, of_twin.decode_s) == (1.0, 5.0, 0.0)
    assert clock.closed
