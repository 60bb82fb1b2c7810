"""kv_scatter in Triton: on a GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch
from kernel_paths import DEVICE, assert_same, random
from torch import Tensor

from legato.kernels import kv_scatter_triton
from legato.kernels.kv_pages import QUANTIZED_DTYPES, KvPages
from legato.kernels.kv_quantize import LARGEST, quantize_rows

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
TINY = torch.finfo(torch.float32).tiny


def make_pages(dtype: torch.dtype, num_slots: int, num_kv_heads: int, head_dim: int) -> KvPages:
    """Every byte is 1, and every scale 7."""
    k, v = torch.ones(
        2, num_slots, num_kv_heads, head_dim * dtype.itemsize, dtype=torch.uint8, device=DEVICE
    ).view(dtype)
    if dtype not in QUANTIZED_DTYPES:
        return KvPages(k, v)
    return KvPages(k, v, *torch.full((2, num_slots, num_kv_heads), 7.0, device=DEVICE))


def as_bytes(rows: Tensor) -> Tensor:
    return rows.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("kv_dtype", [*FLOATS, *QUANTIZED_DTYPES])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(3, 80), (20, 16)])
def test_the_slots_and_nothing_else_are_written(
    dtype: torch.dtype, kv_dtype: torch.dtype, num_kv_heads: int, head_dim: int
) -> None:
    # 1 query head a KV head, then keys and values, as a fused projection gives them.
    fused = random("triton", 5, 3 * num_kv_heads, head_dim, dtype=torch.float32)
    fused = (fused * fused.abs().exp()).to(dtype)  # of many magnitudes
    k, v = fused[:, num_kv_heads : 2 * num_kv_heads], fused[:, 2 * num_kv_heads :]
    pages = make_pages(kv_dtype, 32, num_kv_heads, head_dim)
    untouched = make_pages(kv_dtype, 32, num_kv_heads, head_dim)
    slots = torch.tensor([31, 0, 7, 16, 2], device=DEVICE)
    kv_scatter_triton.kv_scatter(k, v, pages, slots)

    others = [slot for slot in range(32) if slot not in slots.tolist()]
    for new, rows, scales, before in (
        (k, pages.k, pages.k_scale, untouched.k),
        (v, pages.v, pages.v_scale, untouched.v),
    ):
        assert torch.equal(as_bytes(rows)[others], as_bytes(before)[others])
        if scales is None:
            assert_same(rows[slots].cpu(), new.to(kv_dtype).cpu())
        else:
            expected, expected_scales = quantize_rows(new.cpu(), kv_dtype)
            assert torch.equal(as_bytes(rows)[slots.cpu()], as_bytes(expected))
            assert torch.equal(scales[slots].cpu(), expected_scales)
            assert (scales[others] == 7).all()


@pytest.mark.parametrize("kv_dtype", QUANTIZED_DTYPES)
def test_every_rounding_of_8_bits(kv_dtype: torch.dtype) -> None:
    # Scale 1: the largest element is the largest value. Ties, halves, subnormals of e4m3, zeros.
    largest = LARGEST[kv_dtype]
    ramp = torch.cat(
        [
            torch.arange(-1016, 1017) / 8,
            torch.arange(-80, 81) / 2.0**13,
            2.0 ** torch.arange(-14, 7),
            torch.tensor([0.0, -0.0, 17.0, 18.0, 19.0, 25.0, 27.0, 127.0, -447.9]),
        ]
    ).clamp(-largest, largest)
    rows = torch.cat([ramp, torch.zeros(-ramp.numel() % 63)]).view(-1, 1, 63)
    rows = torch.cat([rows, torch.full((rows.shape[0], 1, 1), largest)], -1).to(DEVICE)
    pages = make_pages(kv_dtype, rows.shape[0], 1, 64)
    slots = torch.arange(rows.shape[0], device=DEVICE)
    kv_scatter_triton.kv_scatter(rows, -rows, pages, slots)
    assert pages.k_scale is not None
    assert (pages.k_scale == 1).all()
    assert torch.equal(as_bytes(pages.k), as_bytes(quantize_rows(rows.cpu(), kv_dtype)[0]))
    assert torch.equal(as_bytes(pages.v), as_bytes(quantize_rows(-rows.cpu(), kv_dtype)[0]))


@pytest.mark.parametrize("kv_dtype", QUANTIZED_DTYPES)
def test_rows_too_small_for_a_scale_become_zeros(kv_dtype: torch.dtype) -> None:
    values = (0.0, 1e-45, 100 * TINY, 500 * TINY)
    rows = torch.stack([torch.full((1, 16), value) for value in values]).to(DEVICE)
    pages = make_pages(kv_dtype, 4, 1, 16)
    kv_scatter_triton.kv_scatter(rows, rows, pages, torch.arange(4, device=DEVICE))
    expected, scales = quantize_rows(rows.cpu(), kv_dtype)
    assert pages.k_scale is not None
    assert scales[:2].eq(0).all()
    assert scales[3] > 0
    assert torch.equal(pages.k_scale.cpu(), scales)
    assert torch.equal(as_bytes(pages.k), as_bytes(expected))


def test_slots_beyond_two_to_the_31_elements() -> None:
    # 2^31 + bytes of memory that is never touched but at its end.
    num_slots = 2**31 // (8 * 64) + 2
    rows = torch.empty((num_slots, 8, 64), dtype=torch.int8, device=DEVICE)
    scales = torch.empty((num_slots, 8), device=DEVICE)
    new = random("triton", 2, 8, 64)
    slots = torch.tensor([num_slots - 1, num_slots - 2], device=DEVICE)
    kv_scatter_triton.kv_scatter(new, new, KvPages(rows, rows, scales, scales), slots)
    assert torch.equal(rows[slots].cpu(), quantize_rows(new.cpu(), torch.int8)[0])


def test_wrong_arguments_are_refused_by_name() -> None:
    rows, pages = random("triton", 2, 3, 16), make_pages(torch.int8, 8, 3, 16)
    slots = torch.tensor([0, 1], device=DEVICE)
    apart = rows.transpose(1, 2).contiguous().transpose(1, 2)
    assert pages.k_scale is not None
    wrong = [
        ("^v's heads must be contiguous", rows, apart, pages, slots),
        ("^k must have shape", rows[:1], rows, pages, slots),
        ("^v must have shape", rows, rows[:, :2], pages, slots),
        ("^v must be torch.float32 like k", rows, rows.half(), pages, slots),
        (
            "^k_scale: exactly 8-bit rows have scales",
            rows.to(torch.int8),
            rows.to(torch.int8),
            pages,
            slots,
        ),
        (
            "^pages.v_scale must have shape",
            rows,
            rows,
            KvPages(pages.k, pages.v, pages.k_scale, pages.k_scale[:-1]),
            slots,
        ),
        (
            "^pages.k_scale must be torch.float32",
            rows,
            rows,
            KvPages(pages.k, pages.v, pages.k_scale.half(), pages.k_scale),
            slots,
        ),
        ("^slots must be .n. integers", rows, rows, pages, slots.float()),
        ("^slots must be contiguous", rows, rows, pages, torch.arange(4, device=DEVICE)[::2]),
    ]
    before = as_bytes(pages.k)
    for message, k, v, target, places in wrong:
        with pytest.raises(ValueError, match=message):
            kv_scatter_triton.kv_scatter(k, v, target, places)
    assert torch.equal(as_bytes(pages.k), before)
