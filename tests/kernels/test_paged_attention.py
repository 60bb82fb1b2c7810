from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from paged_kv import PagedCase, make_case

from legato.kernels import (
    paged_decode_attention,
    paged_decode_attention_triton,
    paged_prefill_attention,
    paged_prefill_attention_triton,
    reference,
)
from legato.kernels.attention_plan import CPU_TILE, TRITON_TILE, AttentionPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Attention = Callable[[Tensor, Tensor, Tensor, AttentionPlan, float], Tensor]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DECODE = {
    "cpu": paged_decode_attention.paged_decode_attention,
    "triton": paged_decode_attention_triton.paged_decode_attention,
}
PREFILL = {
    "cpu": paged_prefill_attention.paged_prefill_attention,
    "triton": paged_prefill_attention_triton.paged_prefill_attention,
}
HEADS = [(4, 4), (4, 1), (6, 2), (12, 1), (9, 3)]


def device_of(path: str) -> str:
    return DEVICE if path == "triton" else "cpu"


def expected(case: PagedCase) -> Tensor:
    plan = case.plan
    return reference.paged_attention(
        case.q.cpu(),
        case.k_cache.cpu(),
        case.v_cache.cpu(),
        plan.block_tables,
        plan.query_starts,
        plan.context_lens,
        plan.block_size,
        case.scale,
    )


def run(attention: Attention, case: PagedCase) -> Tensor:
    return attention(case.q, case.k_cache, case.v_cache, case.plan, case.scale)


def check(attention: Attention, case: PagedCase, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        run(attention, case).cpu(), expected(case), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("path", DECODE)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_decode_shapes(path: str, heads: tuple[int, int], head_dim: int) -> None:
    lengths = [1, 15, 16, 17, 70]
    check(
        DECODE[path],
        make_case(
            context_lens=lengths,
            num_queries=[1] * len(lengths),
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            device=device_of(path),
        ),
    )


@pytest.mark.parametrize("path", PREFILL)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_prefill_shapes(path: str, heads: tuple[int, int], head_dim: int) -> None:
    check(
        PREFILL[path],
        make_case(
            context_lens=[1, 16, 17, 40],
            num_queries=[1, 16, 3, 33],
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            device=device_of(path),
        ),
    )


@pytest.mark.parametrize("path", PREFILL)
@pytest.mark.parametrize("edge", [-1, 0, 1])
def test_prefill_around_the_edge_of_a_tile(path: str, edge: int) -> None:
    tile = CPU_TILE if path == "cpu" else TRITON_TILE
    lengths = [tile + edge, 2 * tile + edge, 2 * tile + 5]
    check(
        PREFILL[path],
        make_case(
            context_lens=lengths,
            num_queries=[lengths[0], lengths[1], tile + edge],
            device=device_of(path),
        ),
    )


@pytest.mark.parametrize("path", ["cpu", "triton"])
@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_block_sizes(path: str, block_size: int) -> None:
    device = device_of(path)
    lengths = [1, block_size, block_size + 1, 40]
    check(
        DECODE[path],
        make_case(context_lens=lengths, num_queries=[1] * 4, block_size=block_size, device=device),
    )
    check(
        PREFILL[path],
        make_case(
            context_lens=lengths, num_queries=[1, 1, 2, 40], block_size=block_size, device=device
        ),
    )


@pytest.mark.parametrize("path", ["cpu", "triton"])
def test_half_precision(path: str) -> None:
    # Triton's interpreter multiplies the raw bits of bfloat16: there, float16 stands in for it.
    interpreted = path == "triton" and DEVICE == "cpu"
    dtype = torch.float16 if interpreted else torch.bfloat16
    for attention, num_queries in ((DECODE[path], [1, 1]), (PREFILL[path], [33, 20])):
        case = make_case(
            context_lens=[33, 70], num_queries=num_queries, dtype=dtype, device=device_of(path)
        )
        check(attention, case, tolerance=2e-2)


def test_consecutive_blocks_are_read_in_place_and_give_the_same_bits() -> None:
    for attention, num_queries in ((DECODE["cpu"], [1, 1]), (PREFILL["cpu"], [70, 20])):
        case = make_case(context_lens=[70, 33], num_queries=num_queries, shuffle=False)
        assert all(isinstance(sequence.kv, slice) for sequence in case.plan.cpu_sequences)
        check(attention, case)
        # The same rows in blocks laid out backwards.
        backwards = torch.arange(case.plan.block_tables[-1][-1], -1, -1)
        block_size, last = case.plan.block_size, int(backwards[0])
        tables = [[last - block for block in table] for table in case.plan.block_tables]

        def reverse(pages: Tensor, order: Tensor = backwards, size: int = block_size) -> Tensor:
            blocks = pages.view(-1, size, *pages.shape[1:])
            return blocks.index_select(0, order).flatten(0, 1)

        plan = AttentionPlan(
            case.plan.query_starts, case.plan.context_lens, tables, block_size, case.plan.device
        )
        assert not any(isinstance(sequence.kv, slice) for sequence in plan.cpu_sequences)
        gathered = attention(case.q, reverse(case.k_cache), reverse(case.v_cache), plan, case.scale)
        assert torch.equal(gathered, run(attention, case))


@pytest.mark.parametrize("path", ["cpu", "triton"])
@pytest.mark.parametrize("decode", [True, False])
def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch(path: str, *, decode: bool) -> None:
    attention = (DECODE if decode else PREFILL)[path]
    lengths = [5, 100, 31]
    case = make_case(
        context_lens=lengths,
        num_queries=[1] * 3 if decode else [5, 70, 31],
        device=device_of(path),
    )
    together = run(attention, case)
    plan = case.plan
    for s, length in enumerate(lengths):
        start, end = plan.query_starts[s], plan.query_starts[s + 1]
        alone = AttentionPlan(
            [0, end - start], [length], [plan.block_tables[s]], plan.block_size, plan.device
        )
        result = attention(case.q[start:end], case.k_cache, case.v_cache, alone, case.scale)
        assert torch.equal(result, together[start:end])


@pytest.mark.parametrize("path", ["cpu", "triton"])
@pytest.mark.parametrize("decode", [True, False])
def test_one_lost_row_and_one_shifted_length_are_seen(path: str, *, decode: bool) -> None:
    attention = (DECODE if decode else PREFILL)[path]
    case = make_case(
        context_lens=[40, 50], num_queries=[1, 1] if decode else [40, 9], device=device_of(path)
    )
    right = expected(case)
    plan = case.plan
    slot = plan.block_tables[1][20 // plan.block_size] * plan.block_size + 20 % plan.block_size
    lost = case.k_cache.clone()
    lost[slot] = 0
    broken = attention(case.q, lost, case.v_cache, plan, case.scale).cpu()
    assert (broken - right).abs().max() > 1e-3
    shorter = AttentionPlan(
        plan.query_starts, [40, 49], plan.block_tables, plan.block_size, plan.device
    )
    shifted = attention(case.q, case.k_cache, case.v_cache, shorter, case.scale).cpu()
    assert (shifted - right).abs().max() > 1e-3


def test_triton_refuses_query_heads_that_do_not_lie_together() -> None:
    case = make_case(context_lens=[4], num_queries=[1], device=DEVICE)
    apart = case.q.repeat_interleave(2, -1)[..., ::2]
    for attention in (DECODE["triton"], PREFILL["triton"]):
        with pytest.raises(ValueError, match="q's heads must be contiguous"):
            attention(apart, case.k_cache, case.v_cache, case.plan, case.scale)
