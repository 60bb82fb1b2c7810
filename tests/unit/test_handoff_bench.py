from __future__ import annotations

import threading

import numpy as np
import pytest

from legato.bench.handoff.copies import PlainCopy, SharedRing, pieces
from legato.bench.handoff.exposed import Exposed, StreamTimes
from legato.bench.handoff.lanes import LANES, chunk_bytes, transport, window_bytes
from legato.bench.handoff.spread import Spread
from legato.bench.handoff.sweep import settings
from legato.bench.handoff.two_workers import memory_path


def stream(gap_s: float, *, prefill_model_s: float = 2.0) -> StreamTimes:
    """Tokens 0.1 s apart, but for the second one."""
    times = [1.0, 1.0 + gap_s]
    times += [times[-1] + 0.1 * i for i in range(1, 6)]
    return StreamTimes(tuple(times), prefill_model_s, 0.2, 0.3, 1000)


def test_what_is_exposed_is_beyond_a_decode_step() -> None:
    assert stream(0.4).decode_step_s == pytest.approx(0.1)
    assert stream(0.4).exposed_s == pytest.approx(0.3)
    assert stream(0.05).exposed_s == pytest.approx(-0.05)


def test_a_late_token_does_not_pass_for_a_decode_step() -> None:
    times = (0.0, 0.4, 0.5, 0.6, 5.0, 5.1)
    assert StreamTimes(times, 1.0, 0.0, 0.0, 1).exposed_s == pytest.approx(0.3)


def test_the_share_is_of_each_request() -> None:
    streams = [stream(0.3, prefill_model_s=1.0), stream(0.5, prefill_model_s=4.0), stream(0.1)]
    exposed = Exposed.of(512, streams)
    assert exposed.exposed_of_prefill.median == pytest.approx(0.1)
    assert exposed.exposed_of_prefill.highest == pytest.approx(0.2)
    assert exposed.exposed_s.median == pytest.approx(0.2)


def test_ratios_are_of_the_same_round() -> None:
    assert Spread.of_ratios([1.0, 4.0, 9.0], [2.0, 4.0, 6.0]) == Spread(1.0, 0.5, 1.5)
    with pytest.raises(ValueError, match="nothing was measured"):
        Spread.of([])


def test_pieces_cover_everything_once() -> None:
    assert list(pieces(10, 4)) == [slice(0, 4), slice(4, 8), slice(8, 10)]


def test_a_plain_copy_copies() -> None:
    copy = PlainCopy(1000, 300)
    assert copy.seconds() > 0
    assert (copy._target == 1).all()


def test_a_ring_gives_what_was_put_in_however_often_it_goes_round() -> None:
    ring, file = SharedRing.create(3, 64)
    source = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    out = [np.zeros(1000, np.uint8) for _ in range(2)]
    other = SharedRing.open(memory_path(file), 3, 64)  # a mapping of its own

    def copy_out() -> None:
        for target in out:
            other.copy_out(target)

    thread = threading.Thread(target=copy_out)
    thread.start()
    ring.copy_in(source)
    ring.copy_in(source[::-1].copy())
    thread.join(20)
    assert (out[0] == source).all()
    assert (out[1] == source[::-1]).all()


def test_a_sweep_never_waits_for_the_only_chunk() -> None:
    tried = list(settings())
    assert len(tried) == len(set(tried)) > 20
    assert all(2 * chunk <= window for chunk, window in tried)


def test_the_products_constants_are_back_after_a_sweep() -> None:
    before = [(chunk_bytes(lane), window_bytes(lane)) for lane in LANES]
    with transport(12345, 67890):
        assert (chunk_bytes("grpc"), window_bytes("grpc")) == (12345, 67890)
        memory = chunk_bytes("shared_memory"), window_bytes("shared_memory")
        assert memory == (12345, 5 * 12345)
    assert [(chunk_bytes(lane), window_bytes(lane)) for lane in LANES] == before
