"""Decode and prefill attention in Triton: on a GPU where there is one, else interpreted.

The interpreter multiplies the raw bits of bfloat16: there, float16 stands in for it.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_paths import DEVICE, use_path
from paged_kv import PagedCase, make_case
from torch import Tensor

from legato.kernels import (
    paged_decode_attention,
    paged_decode_attention_triton,
    paged_prefill_attention,
    paged_prefill_attention_triton,
    paged_rows_triton,
    reference,
)
from legato.kernels.attention_plan import AttentionPlan
from legato.kernels.kv_pages import QUANTIZED_DTYPES, KvPages

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
KINDS = ["decode", "prefill"]
LAUNCHERS = {
    "decode": paged_decode_attention_triton.paged_decode_attention,
    "prefill": paged_prefill_attention_triton.paged_prefill_attention,
}


def run(kind: str, case: PagedCase) -> Tensor:
    out = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype, device=DEVICE)
    result = LAUNCHERS[kind](case.q, case.pages, case.plan, case.scale, case.window, out)
    assert result is out
    return result


def expected(case: PagedCase) -> Tensor:
    pages = KvPages(
        *(
            None if tensor is None else tensor.cpu()
            for tensor in (case.pages.k, case.pages.v, case.pages.k_scale, case.pages.v_scale)
        )
    )
    return reference.paged_attention(case.q.cpu(), pages, case.plan, case.scale, window=case.window)


def check(kind: str, case: PagedCase, tolerance: float | None = None) -> None:
    tolerance = TOLERANCES[case.q.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(
        run(kind, case).cpu().double(), expected(case), rtol=tolerance, atol=tolerance
    )


def queries(kind: str, prefill: list[int]) -> list[int]:
    return [1] * len(prefill) if kind == "decode" else prefill


SHAPES = [
    (4, 4, 16),
    (4, 1, 64),
    (6, 2, 80),
    (12, 1, 96),
    (9, 3, 128),
    (5, 1, 256),
    (70, 1, 16),  # a group larger than the tile
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_shapes(kind: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if kind == "prefill":  # a program a query head
        num_heads, num_kv_heads = min(num_heads, 6), min(num_kv_heads, 2)
    check(
        kind,
        make_case(
            context_lens=[1, 17, 40],
            num_queries=queries(kind, [1, 3, 33]),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            device=DEVICE,
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, *QUANTIZED_DTYPES])
@pytest.mark.parametrize("window", [None, 9])
def test_dtypes_of_pages(kind: str, kv_dtype: torch.dtype, window: int | None) -> None:
    check(
        kind,
        make_case(
            context_lens=[5, 70],
            num_queries=queries(kind, [5, 34]),
            kv_dtype=kv_dtype,
            window=window,
            device=DEVICE,
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, *QUANTIZED_DTYPES])
def test_nan_that_a_former_owner_left_is_not_read(kind: str, kv_dtype: torch.dtype) -> None:
    case = make_case(
        context_lens=[5, 70], num_queries=queries(kind, [5, 34]), kv_dtype=kv_dtype, device=DEVICE
    )
    former = torch.ones(case.pages.k.shape[0], dtype=torch.bool)
    for sequence, length in enumerate(case.plan.context_lens.tolist()):
        former[[case.slot(sequence, position) for position in range(length)]] = False
    pages = case.pages
    for rows in (pages.k, pages.v) if kv_dtype == torch.float32 else (pages.k_scale, pages.v_scale):
        assert rows is not None
        rows[former] = torch.nan
    check(kind, case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_dtype", [HALF, *QUANTIZED_DTYPES])
def test_half_precision(kind: str, kv_dtype: torch.dtype) -> None:
    case = make_case(
        context_lens=[33, 70],
        num_queries=queries(kind, [33, 20]),
        dtype=HALF,
        kv_dtype=kv_dtype,
        device=DEVICE,
    )
    check(kind, case)


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_to_read_e4m3_give_the_same_bits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton does not convert e4m3 on this device")
    case = make_case(
        context_lens=[70],
        num_queries=queries(kind, [4]),
        kv_dtype=torch.float8_e4m3fn,
        device=DEVICE,
    )
    # All bytes but the two that are no number, subnormals included.
    values = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
    for rows in (case.pages.k, case.pages.v):
        data = rows.view(torch.uint8)
        data.copy_(values.repeat(-(-data.numel() // 254))[: data.numel()].view(data.shape))
    results = []
    for native in (True, False):
        monkeypatch.setattr(paged_rows_triton, "has_e4m3", lambda _, native=native: native)
        results.append(run(kind, case))
    assert torch.equal(*results)
    torch.testing.assert_close(results[0].cpu().double(), expected(case), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 5, 16, 32])
def test_block_sizes(kind: str, block_size: int) -> None:
    check(
        kind,
        make_case(
            context_lens=[1, block_size, block_size + 1, 40],
            num_queries=queries(kind, [1, 1, 2, 35]),
            block_size=block_size,
            num_heads=2,
            num_kv_heads=1,
            device=DEVICE,
        ),
    )


@pytest.mark.parametrize("window", [1, 31, 32, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_around_the_edges_of_tiles(kind: str, window: int) -> None:
    check(
        kind,
        make_case(
            context_lens=[31, 97],
            num_queries=queries(kind, [31, 70]),
            num_heads=1,
            num_kv_heads=1,
            window=window,
            device=DEVICE,
        ),
    )


@pytest.mark.parametrize("edge", [-1, 0, 1])
def test_prefill_around_the_edge_of_a_tile(edge: int) -> None:
    tile, *_ = paged_prefill_attention_triton.tiles(16, 4, 4)
    lengths = [tile + edge, 2 * tile + edge, 2 * tile + 5]
    check(
        "prefill",
        make_case(
            context_lens=lengths,
            num_queries=[lengths[0], lengths[1], tile + edge],
            num_heads=1,
            num_kv_heads=1,
            device=DEVICE,
        ),
    )


@pytest.mark.parametrize("window", [None, 70, 300])
def test_decode_merges_splits(window: int | None) -> None:
    split = paged_decode_attention_triton.SPLIT
    check(
        "decode",
        make_case(
            context_lens=[split, split + 1, 2 * split + 77],
            num_queries=[1, 1, 1],
            num_kv_heads=1,
            window=window,
            device=DEVICE,
        ),
    )


@pytest.mark.parametrize("window", [None, 70, 170])
def test_decode_parts_take_several_splits_of_a_long_context(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_decode_attention_triton, "SPLIT", 32)
    monkeypatch.setattr(paged_decode_attention_triton, "MAX_PARTS", 4)
    case = make_case(
        context_lens=[128, 129, 300, 31],
        num_queries=[1] * 4,
        num_kv_heads=1,
        window=window,
        device=DEVICE,
    )
    check("decode", case)
    # Neither does the width of the table, here of fewer parts, change a bit.
    assert torch.equal(run("decode", case.only([3])), run("decode", case)[3:])


def test_decode_rows_without_context_give_zeros() -> None:
    case = make_case(context_lens=[20, 7], num_queries=[1, 1], device=DEVICE)
    case.plan.context_lens[1] = 0
    assert not run("decode", case)[1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_gives_the_same_bits_alone_and_among_32(kind: str) -> None:
    lengths = [3 + s % 5 for s in range(32)]
    lengths[20] = 70 if kind == "decode" else 40
    case = make_case(
        context_lens=lengths,
        num_queries=queries(kind, [min(length, 37) for length in lengths]),
        num_heads=2,
        num_kv_heads=1,
        device=DEVICE,
    )
    together = run(kind, case)
    starts = case.plan.query_starts.tolist()
    for others, width in (([20], None), ([4, 20], 40)):
        alone = case.only(others, width)
        place = others.index(20)
        start, end = alone.plan.query_starts.tolist()[place : place + 2]
        assert torch.equal(run(kind, alone)[start:end], together[starts[20] : starts[21]])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_a_query_gives_the_same_bits_however_its_prompt_is_cut(
    window: int | None, kv_dtype: torch.dtype
) -> None:
    case = make_case(
        context_lens=[101],
        num_queries=[101],
        num_heads=1,
        num_kv_heads=1,
        kv_dtype=kv_dtype,
        window=window,
        device=DEVICE,
    )
    whole = run("prefill", case)
    table = [case.plan.block_table[0].tolist()]
    for start, end in ((0, 37), (37, 38), (38, 101)):
        plan = AttentionPlan.build([0, end - start], [end], table, 16, case.q.device)
        chunk = dataclasses.replace(case, q=case.q[start:end], plan=plan)
        assert torch.equal(run("prefill", chunk), whole[start:end])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", ["k", "v", "k_scale", "v_scale"])
def test_one_lost_row_and_one_lost_scale_are_seen(kind: str, field: str) -> None:
    case = make_case(
        context_lens=[40, 50],
        num_queries=queries(kind, [40, 9]),
        kv_dtype=torch.int8,
        device=DEVICE,
    )
    right = run(kind, case)
    getattr(case.pages, field)[case.slot(1, 20)] = 0
    changed = (run(kind, case) - right).abs().amax((1, 2))
    first_of_1 = int(case.plan.query_starts[1])
    assert changed[first_of_1:].min() > 1e-3
    assert not changed[:first_of_1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_shifted_length_is_seen(kind: str) -> None:
    case = make_case(context_lens=[40, 50], num_queries=queries(kind, [40, 9]), device=DEVICE)
    right = run(kind, case)
    case.plan.context_lens[1] = 49
    assert (run(kind, case) - right)[int(case.plan.query_starts[1]) :].abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_beyond_two_to_the_31(kind: str) -> None:
    # 2^31 + bytes of memory that is never touched but at its end.
    block_size, num_kv_heads, head_dim = 16, 8, 64
    last = 2**31 // (block_size * num_kv_heads * head_dim) + 1
    num_slots = (last + 1) * block_size
    rows = torch.empty((num_slots, num_kv_heads, head_dim), dtype=torch.int8, device=DEVICE)
    scales = torch.empty((num_slots, num_kv_heads), device=DEVICE)
    assert (num_slots - block_size) * num_kv_heads * head_dim > 2**31
    generator = torch.Generator().manual_seed(3)
    used = slice(last * block_size, num_slots)
    rows[used] = torch.randint(-127, 128, (16, 8, 64), generator=generator).to(rows)
    scales[used] = torch.rand(16, 8, generator=generator).to(scales) / 64
    q = torch.randn(1, 8, head_dim, generator=generator).to(DEVICE)
    device = torch.device(DEVICE)
    big = PagedCase(
        q,
        KvPages(rows, rows, scales, scales),
        AttentionPlan.build([0, 1], [16], [[last]], block_size, device),
        0.125,
    )
    small = dataclasses.replace(
        big,
        pages=KvPages(rows[used], rows[used], scales[used], scales[used]),
        plan=AttentionPlan.build([0, 1], [16], [[0]], block_size, device),
    )
    result = run(kind, big)
    torch.testing.assert_close(result.cpu().double(), expected(small), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a CUDA device")
def test_a_cuda_graph_reads_lengths_and_tables_again() -> None:
    case = make_case(context_lens=[40, 300], num_queries=[1, 1], dtype=HALF, device=DEVICE)
    run("decode", case)  # compiles
    out = torch.empty_like(case.q.contiguous())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        LAUNCHERS["decode"](case.q, case.pages, case.plan, case.scale, None, out)
    case.plan.context_lens.copy_(torch.tensor([33, 17]))
    graph.replay()
    assert torch.equal(out, run("decode", case))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_the_portable_path(
    kind: str, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path("portable", monkeypatch)
    case = make_case(
        context_lens=[1, 16, 90],
        num_queries=queries(kind, [1, 16, 70]),
        num_heads=6,
        kv_dtype=kv_dtype,
        window=33,
    )
    attention = {
        "decode": paged_decode_attention.paged_decode_attention,
        "prefill": paged_prefill_attention.paged_prefill_attention,
    }[kind]
    result = attention(case.q, case.pages, case.plan, case.scale, window=case.window)
    torch.testing.assert_close(result.double(), expected(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arguments_are_refused_by_name(kind: str) -> None:
    case = make_case(context_lens=[4], num_queries=[1], kv_dtype=torch.int8, device=DEVICE)
    pages, plan = case.pages, case.plan
    assert pages.k_scale is not None
    wrong: list[tuple[str, dict[str, object]]] = [
        ("a row of q must be contiguous", {"q": case.q.repeat_interleave(2, -1)[..., ::2]}),
        ("q's head_dim must be at most 256", {"q": case.q.new_zeros(1, 4, 272)}),
        ("q's 3 heads do not share 2 KV heads evenly", {"q": case.q[:, :3]}),
        ("window must be at least 1, got 0", {"window": 0}),
        ("pages.k must have shape", {"q": case.q.new_zeros(1, 4, 32)}),
        ("pages.v must have shape", {"pages": dataclasses.replace(pages, v=pages.v[:-1])}),
        (
            "pages.v must be contiguous",
            {"pages": dataclasses.replace(pages, v=pages.v.repeat(1, 1, 2)[..., ::2])},
        ),
        (
            "pages.k_scale must have shape",
            {"pages": dataclasses.replace(pages, k_scale=pages.k_scale[:-1])},
        ),
        (
            "the plan's context_lens must be int32",
            {"plan": dataclasses.replace(plan, context_lens=plan.context_lens.long())},
        ),
        (
            "the plan's block_table must be int32 .* strides",
            {"plan": dataclasses.replace(plan, block_table=plan.block_table.repeat(1, 2)[:, ::2])},
        ),
    ]
    for message, change in wrong:
        with pytest.raises(ValueError, match=message):
            run(kind, dataclasses.replace(case, **change))
    with pytest.raises(ValueError, match="out must have shape"):
        LAUNCHERS[kind](case.q, pages, plan, case.scale, None, case.q.new_zeros(2, 4, 16))
