"""KvMover against plain torch indexing, in every form of KV."""

from __future__ import annotations

import pytest
import torch

from legato.worker.kv import host_slots, mover
from legato.worker.kv.cache import KvCache, KvShape
from legato.worker.kv.mover import KvMover
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.decision import BlockCopy, Decision, SwapIn, SwapOut
from legato.worker.sequence import Sequence

NUM_BLOCKS, NUM_SLOTS = 12, 9
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
SEQUENCE = Sequence([1], 1, SamplingParams.greedy_for(1), frozenset())


def random_cache(dtype: torch.dtype, block_size: int, head_dim: int) -> KvCache:
    shape = KvShape(3, 2, head_dim, block_size, dtype)
    cache = KvCache(shape, NUM_BLOCKS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for rows in all_rows(cache):
        data = torch.randint(256, rows.view(torch.uint8).shape, generator=generator)
        rows.view(torch.uint8).copy_(data)
    return cache


def all_rows(cache: KvCache) -> list[torch.Tensor]:
    tensors = [t for p in cache.layers for t in (p.k, p.v, p.k_scale, p.v_scale)]
    return [tensor for tensor in tensors if tensor is not None]


class Reference:
    """Bytes of whole blocks, moved one by one in the order that is written down."""

    def __init__(self, cache: KvCache) -> None:
        self.blocks = [self._bytes(rows) for rows in all_rows(cache)]
        self.slots = [torch.zeros(NUM_SLOTS, b.shape[1], dtype=torch.uint8) for b in self.blocks]

    @staticmethod
    def _bytes(rows: torch.Tensor) -> torch.Tensor:
        return rows.clone().view(torch.uint8).reshape(NUM_BLOCKS + 1, -1)

    def run(self, decision: Decision) -> None:
        for blocks, slots in zip(self.blocks, self.slots, strict=True):
            for copy in decision.copies:
                blocks[copy.target] = blocks[copy.source]
            for out in decision.swap_outs:
                for block, slot in zip(out.blocks, out.slots, strict=True):
                    slots[slot] = blocks[block]
            for back in decision.swap_ins:
                for slot, block in zip(back.slots, back.blocks, strict=True):
                    blocks[block] = slots[slot]

    def check(self, cache: KvCache) -> None:
        for right, rows in zip(self.blocks, all_rows(cache), strict=True):
            assert torch.equal(self._bytes(rows), right)


@pytest.fixture(params=["whole", "pieces"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where neither the buffer nor a segment of the host's memory holds what is moved."""
    if request.param == "pieces":
        monkeypatch.setattr(mover, "_STAGING_BYTES", 5000)
        monkeypatch.setattr(host_slots, "_SEGMENT_BYTES", 5000)


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "head_dim"), [(4, 16), (3, 5)])
def test_moves_are_those_of_plain_indexing(
    dtype: torch.dtype, block_size: int, head_dim: int
) -> None:
    cache = random_cache(dtype, block_size, head_dim)
    moves, right = KvMover(cache, NUM_SLOTS), Reference(cache)
    decisions = [
        Decision([], copies=[BlockCopy(3, 7), BlockCopy(3, 9), BlockCopy(0, 11)]),
        Decision([], swap_outs=[SwapOut(SEQUENCE, [7, 2, 9, 4, 5], [4, 0, 1, 2, 8])]),
        # What is brought back lies where another is swapped out, and copies come first.
        Decision(
            [],
            copies=[BlockCopy(11, 6)],
            swap_outs=[SwapOut(SEQUENCE, [6, 1], [3, 5]), SwapOut(SEQUENCE, [8, 1], [6, 7])],
            swap_ins=[SwapIn(SEQUENCE, [0, 1, 2], [1, 8, 6]), SwapIn(SEQUENCE, [8], [11])],
        ),
        Decision(
            [],
            swap_outs=[SwapOut(SEQUENCE, [0], [1])],
            swap_ins=[SwapIn(SEQUENCE, [6, 3, 5, 1], [10, 2, 0, 4])],
        ),
        Decision([]),
    ]
    for decision in decisions:
        moves.run(decision)
        right.run(decision)
        right.check(cache)


def test_without_slots_it_copies_within_the_pool() -> None:
    cache = random_cache(torch.float32, 4, 16)
    moves, right = KvMover(cache, 0), Reference(cache)
    moves.run(decision := Decision([], copies=[BlockCopy(1, 2)]))
    right.run(decision)
    right.check(cache)
    with pytest.raises(AssertionError, match="beyond the host's memory"):
        moves.run(Decision([], swap_outs=[SwapOut(SEQUENCE, [1], [0])]))


def test_host_memory_is_taken_when_a_slot_is_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = random_cache(torch.float32, 4, 16)
    monkeypatch.setattr(host_slots, "_SEGMENT_BYTES", 3 * cache.shape.bytes_per_block)
    moves = KvMover(cache, NUM_SLOTS)
    assert moves._host._segments == {}
    moves.run(Decision([], swap_outs=[SwapOut(SEQUENCE, [1, 2], [7, 8])]))
    assert {n: len(rows) for n, rows in moves._host._segments.items()} == {2: 3}


def test_a_negative_number_of_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="num_slots must not be negative, got -1"):
        KvMover(random_cache(torch.float32, 4, 16), -1)
