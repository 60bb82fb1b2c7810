"""Paged attention in C against the oracle in fp64, and its bits in all company."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from kernel_paths import use_path
from paged_kv import PagedCase, make_case
from torch import Tensor

from legato.kernels import huge_pages, native, reference
from legato.kernels.attention_plan import AttentionPlan
from legato.kernels.kv_pages import NATIVE_DTYPES, KvPages
from legato.kernels.paged_decode_attention import paged_decode_attention
from legato.kernels.paged_prefill_attention import paged_prefill_attention

pytestmark = pytest.mark.skipif(not native.available(), reason="the C kernels are not compiled")

# The error of the products; the pages' own rounding is in the oracle as well. Where bf16 products
# are used, queries and weights are rounded to bf16, as is usual on GPUs.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 1e-5,
    torch.bfloat16: 2e-2,
    torch.int8: 2e-2,
    torch.float8_e4m3fn: 2e-2,
}
HEADS = [(4, 4), (4, 2), (9, 3), (8, 2), (15, 3), (6, 1), (7, 1), (8, 1), (12, 1), (17, 1)]
DTYPES = list(NATIVE_DTYPES)


def poison(case: PagedCase) -> PagedCase:
    """The same case with NaN in every row and scale that no sequence owns."""
    size = case.plan.block_size
    free = torch.ones(case.pages.k.shape[0], dtype=torch.bool)
    for s, length in enumerate(case.plan.context_lens.tolist()):
        slots = [case.slot(s, position) for position in range(length)]
        free[slots] = False
    assert free.sum() >= 3 * size
    pages = case.pages
    for rows, scales in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
        if scales is not None:
            scales[free] = torch.nan
        if rows.dtype == torch.float8_e4m3fn:
            rows.view(torch.uint8)[free] = 0x7F
        elif rows.is_floating_point():
            rows[free] = torch.nan
    # Beyond the blocks of a context the table points out of the pages.
    table = case.plan.block_table.clone()
    for s, length in enumerate(case.plan.context_lens.tolist()):
        table[s, -(-length // size) :] = 2**31 - 1
    table = torch.nn.functional.pad(table, (0, 2), value=-1)
    return dataclasses.replace(case, plan=dataclasses.replace(case.plan, block_table=table))


def attend(case: PagedCase) -> Tensor:
    attention = paged_decode_attention if case.plan.one_query_each else paged_prefill_attention
    return attention(case.q, case.pages, case.plan, case.scale, window=case.window)


def error(case: PagedCase) -> float:
    right = reference.paged_attention(case.q, case.pages, case.plan, case.scale, window=case.window)
    # A NaN counts as an error, whatever is asked of the maximum.
    return float((attend(case) - right).abs().nan_to_num(nan=torch.inf).max())


def chunk(case: PagedCase, start: int, end: int) -> PagedCase:
    """Of a case of one sequence, all of it queries: those of positions [start, end)."""
    plan = AttentionPlan(
        torch.tensor([0, end - start], dtype=torch.int32),
        torch.tensor([end], dtype=torch.int32),
        case.plan.block_table,
        case.plan.block_size,
        end - start,
    )
    return dataclasses.replace(case, q=case.q[start:end], plan=plan)


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_groups_of_heads(kv_dtype: torch.dtype, heads: tuple[int, int]) -> None:
    for head_dim in (16, 64):
        sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
        for num_queries in ([1, 1, 1, 1], [1, 9, 17, 24]):
            case = make_case(
                context_lens=[1, 16, 17, 70], num_queries=num_queries, kv_dtype=kv_dtype, **sizes
            )
            assert error(poison(case)) < TOLERANCE[kv_dtype]


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 6, 16, 34, 64, 80, 96, 128, 256])
def test_head_dims(kv_dtype: torch.dtype, head_dim: int) -> None:
    for num_queries in ([1, 1], [5, 9]):
        case = make_case(
            context_lens=[5, 90],
            num_queries=num_queries,
            num_heads=6,
            num_kv_heads=2,
            head_dim=head_dim,
            kv_dtype=kv_dtype,
        )
        assert error(poison(case)) < TOLERANCE[kv_dtype]


@pytest.mark.parametrize("block_size", [1, 5, 16, 32, 300])
def test_block_sizes(block_size: int) -> None:
    lengths = [1, block_size, block_size + 1, 75]
    for num_queries in ([1] * 4, [1, 1, 2, 40]):
        case = make_case(context_lens=lengths, num_queries=num_queries, block_size=block_size)
        assert error(poison(case)) < 1e-5


@pytest.mark.parametrize("window", [1, 2, 20, 63, 64, 65, 256, 257, 2000])
def test_windows(window: int) -> None:
    for kv_dtype in (torch.float32, torch.int8):
        for num_queries in ([1] * 5, [1, 65, 64, 30, 21]):
            case = make_case(
                context_lens=[1, 65, 320, 256, 321],
                num_queries=num_queries,
                num_heads=3,
                num_kv_heads=1,
                head_dim=8,
                kv_dtype=kv_dtype,
                window=window,
            )
            assert error(poison(case)) < TOLERANCE[kv_dtype]


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_around_the_edges_of_splits(kv_dtype: torch.dtype) -> None:
    lengths = [255, 256, 257, 512, 513]
    for num_queries in ([1] * 5, [2, 3, 2, 1, 14]):
        case = make_case(context_lens=lengths, num_queries=num_queries, kv_dtype=kv_dtype)
        assert error(poison(case)) < TOLERANCE[kv_dtype]


def test_more_query_rows_than_a_tile_takes() -> None:
    # 12 heads a KV head: tiles of 21 tokens; the second sequence begins within one.
    case = make_case(
        context_lens=[150, 90],
        num_queries=[150, 50],
        num_heads=12,
        num_kv_heads=1,
        head_dim=8,
    )
    assert error(case) < 1e-5


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 300])
def test_decode_gives_the_same_bits_alone_in_company_and_on_any_number_of_threads(
    kv_dtype: torch.dtype, window: int | None
) -> None:
    lengths = [1, 40, 255, 256, 257, 512, 513, 700] * 4
    case = make_case(
        context_lens=lengths,
        num_queries=[1] * 32,
        num_heads=9,
        num_kv_heads=3,
        head_dim=32,
        kv_dtype=kv_dtype,
        window=window,
    )
    together = attend(case)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            assert torch.equal(attend(case), together)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(attend(case.only(list(range(31, -1, -1)))), together.flip(0))
    for s in range(32):
        assert torch.equal(attend(case.only([s])), together[s : s + 1])


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_prefill_gives_the_same_bits_in_chunks_in_company_and_as_decode(
    kv_dtype: torch.dtype, window: int | None
) -> None:
    length = 600
    sizes = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32}
    case = make_case(
        context_lens=[70, length, 40],
        num_queries=[70, length, 3],
        kv_dtype=kv_dtype,
        window=window,
        **sizes,
    )
    packed = attend(case)[70 : 70 + length]
    alone = case.only([1])
    whole = attend(alone)
    assert torch.equal(packed, whole)
    for size in (16, 100, 257):
        for start in range(0, length, size):
            end = min(start + size, length)
            assert torch.equal(attend(chunk(alone, start, end)), whole[start:end])
    for position in (0, 1, 63, 64, 255, 256, 257, 511, 512, length - 1):
        one = chunk(alone, position, position + 1)
        assert one.plan.one_query_each  # the decode kernel
        assert torch.equal(attend(one), whole[position : position + 1])


@pytest.mark.parametrize("path", ["native", "portable"])
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9])
def test_what_is_not_finite_reaches_only_tokens_that_see_it(
    path: str, kv_dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    for group, head_dim, bad in ((1, 6, 20), (2, 64, 31), (3, 80, 62), (7, 34, 64)):
        case = make_case(
            context_lens=[90, 90],
            num_queries=[90, 80],
            num_heads=2 * group,
            num_kv_heads=2,
            head_dim=head_dim,
            kv_dtype=kv_dtype,
            window=window,
        )
        right = attend(case)
        for position, value in ((bad, torch.inf), (bad + 1, torch.nan)):
            scales = case.pages.k_scale, case.pages.v_scale
            for rows, scale in zip((case.pages.k, case.pages.v), scales, strict=True):
                (rows if scale is None else scale)[case.slot(0, position), 1] = value
        found = attend(case)
        sees = torch.zeros(170, 2 * group, dtype=torch.bool)
        sees[bad : bad + 1 + (window or 90), group:] = True
        sees[90:] = False
        torch.testing.assert_close(found[~sees], right[~sees], rtol=1e-5, atol=1e-5)
        assert path == "portable" or torch.equal(found[~sees], right[~sees])
        assert found[sees].isnan().all()


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 33])
def test_few_query_rows_give_the_same_bits_as_many(
    kv_dtype: torch.dtype, window: int | None
) -> None:
    """Two to six rows are multiplied without packing the keys, others are not."""
    for group, head_dim in ((1, 6), (2, 34), (3, 64), (4, 80), (5, 128), (6, 96), (1, 256)):
        case = make_case(
            context_lens=[70],
            num_queries=[70],
            num_heads=2 * group,
            num_kv_heads=2,
            head_dim=head_dim,
            kv_dtype=kv_dtype,
            window=window,
        )
        whole = attend(case)
        for start, end in ((0, 1), (1, 3), (31, 32), (62, 65), (69, 70)):
            assert torch.equal(attend(chunk(case, start, end)), whole[start:end])


def test_a_long_context_with_too_many_partials_gives_the_same_bits() -> None:
    # 40 sequences of one huge context share their pages: beyond what partials may take.
    length, num_sequences = 16 * 1024, 40
    pages = KvPages(*(torch.randn(length, 4, 64).bfloat16() for _ in range(2)))
    table = torch.arange(length // 16, dtype=torch.int32)
    q = torch.randn(num_sequences, 16, 64)

    def run(rows: int) -> Tensor:
        plan = AttentionPlan(
            torch.arange(rows + 1, dtype=torch.int32),
            torch.full((rows,), length, dtype=torch.int32),
            table.expand(rows, -1).contiguous(),
            16,
            1,
        )
        return paged_decode_attention(q[:rows], pages, plan, 0.125)

    # 16 heads * (64 + 32) floats a split of each of 4 heads' groups: 40 * 64 splits are 16.8 MB.
    assert torch.equal(run(num_sequences)[:2], run(2))


def test_a_recorded_step_reads_its_plan_again() -> None:
    case = make_case(context_lens=[300, 700], num_queries=[1, 1], num_heads=4, head_dim=32)
    plan = dataclasses.replace(case.plan, context_lens=torch.tensor([1, 1], dtype=torch.int32))
    out = torch.zeros(case.q.shape)
    with native.record() as program:
        paged_decode_attention(case.q, case.pages, plan, case.scale, out=out)
    for lengths in ([300, 700], [5, 513], [256, 1]):
        plan.context_lens[:] = torch.tensor(lengths)
        program.run(2)
        assert torch.equal(out, paged_decode_attention(case.q, case.pages, plan, case.scale))


def test_a_row_without_a_context_is_zeros() -> None:
    case = make_case(context_lens=[300, 20], num_queries=[1, 1])
    case.plan.context_lens[0] = 0
    out = torch.full(case.q.shape, torch.nan)
    paged_decode_attention(case.q, case.pages, case.plan, case.scale, out=out)
    assert not out[0].any()
    assert out[1].any()


def test_rows_beyond_two_to_the_31_elements_are_found() -> None:
    block_size, heads, head_dim = 16, 2, 64
    slots = 2**31 // (heads * head_dim) + 16 * 64
    pages = KvPages(
        *(huge_pages.zeros((slots, heads, head_dim), torch.int8) for _ in range(2)),
        *(huge_pages.zeros((slots, heads), torch.float32) for _ in range(2)),
    )
    small = make_case(
        context_lens=[40], num_queries=[40], num_heads=4, head_dim=head_dim, kv_dtype=torch.int8
    )
    blocks = torch.tensor([[slots // block_size - 1, 3, slots // block_size - 5]])
    far = AttentionPlan(
        small.plan.query_starts, small.plan.context_lens, blocks.to(torch.int32), block_size, 40
    )
    moved = dataclasses.replace(small, pages=pages, plan=far)
    for position in range(40):
        here, there = small.slot(0, position), moved.slot(0, position)
        for name in ("k", "v", "k_scale", "v_scale"):
            getattr(pages, name)[there] = getattr(small.pages, name)[here]
    assert torch.equal(attend(moved), attend(small))
    assert torch.equal(attend(chunk(moved, 39, 40)), attend(small)[39:])


@pytest.mark.parametrize("num_queries", [[1, 1], [40, 9]])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_one_lost_row_one_wrong_scale_and_one_shifted_length_are_seen(
    num_queries: list[int], kv_dtype: torch.dtype
) -> None:
    case = make_case(context_lens=[40, 50], num_queries=num_queries, kv_dtype=kv_dtype)
    right, slot = attend(case), case.slot(1, 20)
    rows = case.pages.k if case.pages.k_scale is None else case.pages.k_scale
    kept = rows[slot].clone()
    rows[slot] = kept * 2
    assert (attend(case) - right).abs().max() > 1e-3
    rows[slot] = 0
    assert (attend(case) - right).abs().max() > 1e-3
    rows[slot] = kept
    assert torch.equal(attend(case), right)
    case.plan.context_lens[1] = 49
    assert (attend(case) - right).abs().max() > 1e-3


def test_what_c_would_not_check_is_refused() -> None:
    case = make_case(context_lens=[4], num_queries=[1])
    apart = dataclasses.replace(case, q=case.q.repeat_interleave(2, -1)[..., ::2])
    with pytest.raises(ValueError, match="row of q must be contiguous"):
        attend(apart)
    with pytest.raises(ValueError, match="q's 3 heads do not share 2 KV heads evenly"):
        attend(dataclasses.replace(case, q=case.q[:, :3]))
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        attend(dataclasses.replace(case, window=0))
    for name in ("context_lens", "block_table", "query_starts"):
        wide = dataclasses.replace(case.plan, **{name: getattr(case.plan, name).long()})
        with pytest.raises(ValueError, match=f"{name} must be int32"):
            attend(dataclasses.replace(case, plan=wide))


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_the_portable_path_serves_the_same_cases(
    kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    for num_queries, window in (([1] * 4, None), ([1, 9, 70, 5], 20), ([1] * 4, 20)):
        case = make_case(
            context_lens=[1, 16, 90, 300],
            num_queries=num_queries,
            num_heads=6,
            num_kv_heads=2,
            kv_dtype=kv_dtype,
            window=window,
        )
        assert error(case) < 1e-5


@pytest.mark.parametrize("level", ["avx2", "avx512"])
def test_the_other_instruction_levels(level: str) -> None:
    """The same oracle on libraries that this machine would not choose, in their own process."""
    if native.level() in (None, "base", "avx2", level):
        pytest.skip("this machine chooses no better level than that")
    script = (
        "import torch\n"
        "from test_native_attention import DTYPES, error, make_case, native, poison\n"
        f"assert native.level() == {level!r}\n"
        "for kv_dtype in DTYPES:\n"
        "    for num_queries, window in (([1, 1, 1], None), ([1, 9, 120], 100)):\n"
        "        for heads, head_dim in ((3, 64), (8, 80), (7, 6)):\n"
        "            case = make_case(context_lens=[1, 40, 300], num_queries=num_queries,\n"
        "                num_heads=heads, num_kv_heads=1, head_dim=head_dim, kv_dtype=kv_dtype,\n"
        "                window=window)\n"
        "            assert error(poison(case)) < 1e-5, (kv_dtype, heads, head_dim, num_queries)\n"
        "    print(kv_dtype)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={
            **os.environ,
            "LEGATO_CPU_LEVEL": level,
            "PYTHONPATH": os.pathsep.join(
                [os.path.dirname(__file__), *(path for path in sys.path if path)]
            ),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(dtype) for dtype in DTYPES]
