"""kv_pack and kv_unpack with conversion in Triton: on a GPU where there is one, or interpreted."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_paths import DEVICE, assert_same, random
from torch import Tensor

from legato.kernels import kv_pack as public
from legato.kernels.kv_pack_triton import kv_pack, kv_unpack
from legato.kernels.kv_pages import QUANTIZED_DTYPES, KvPages
from legato.kernels.kv_quantize import dequantize_rows, quantize_rows

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = [torch.float32, torch.float16, torch.bfloat16, *QUANTIZED_DTYPES]
HEADS, HEAD_DIM = 3, 80


def as_bytes(rows: Tensor) -> Tensor:
    return rows.cpu().contiguous().view(torch.uint8)


def convert(
    rows: Tensor, scales: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """What a move has to give, on the CPU."""
    if rows.dtype == dtype:
        return rows, scales
    wide = rows.float() if scales is None else dequantize_rows(rows, scales)
    return quantize_rows(wide, dtype) if dtype in QUANTIZED_DTYPES else (wide.to(dtype), None)


def make_pages(dtype: torch.dtype, num_slots: int, seed: int) -> KvPages:
    k, v = (random("triton", num_slots, HEADS, HEAD_DIM, seed=seed + i).cpu() for i in range(2))
    k, k_scale = convert(k, None, dtype)
    v, v_scale = convert(v, None, dtype)
    return KvPages(
        k.to(DEVICE),
        v.to(DEVICE),
        None if k_scale is None else k_scale.to(DEVICE),
        None if v_scale is None else v_scale.to(DEVICE),
    )


def empty_data(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    data = torch.empty(2, n, HEADS, HEAD_DIM, dtype=dtype, device=DEVICE)
    return data, torch.empty(data.shape[:3], device=DEVICE) if dtype in QUANTIZED_DTYPES else None


def select(rows: Tensor | None, slots: list[int]) -> Tensor | None:
    """By bytes, for not every index is there for e4m3."""
    return None if rows is None else as_bytes(rows)[slots].view(rows.dtype)


@pytest.mark.parametrize(("kv_dtype", "wire_dtype"), [*itertools.product(DTYPES, repeat=2)])
def test_rows_arrive_in_other_slots_converted(
    kv_dtype: torch.dtype, wire_dtype: torch.dtype
) -> None:
    pages = make_pages(kv_dtype, 48, 1)
    source, target = [40, 3, 17, 18], [0, 31, 5, 9]
    data, scales = empty_data(4, wire_dtype)
    kv_pack(pages, torch.tensor(source, device=DEVICE), data, scales)
    for i, (rows, row_scales) in enumerate(((pages.k, pages.k_scale), (pages.v, pages.v_scale))):
        chosen = select(rows, source)
        assert chosen is not None
        expected, expected_scales = convert(chosen, select(row_scales, source), wire_dtype)
        check(data[i], expected)
        if expected_scales is not None and scales is not None:
            assert torch.equal(scales[i].cpu(), expected_scales)

    landed, before = make_pages(kv_dtype, 32, 5), make_pages(kv_dtype, 32, 5)
    kv_unpack(data, scales, landed, torch.tensor(target, device=DEVICE))
    rest = [slot for slot in range(32) if slot not in target]
    for i, name in enumerate(("k", "v")):
        rows, row_scales = getattr(landed, name), getattr(landed, f"{name}_scale")
        expected, expected_scales = convert(
            data[i].cpu(), None if scales is None else scales[i].cpu(), kv_dtype
        )
        chosen = select(rows, target)
        assert chosen is not None
        check(chosen, expected)
        assert torch.equal(as_bytes(rows)[rest], as_bytes(getattr(before, name))[rest])
        if row_scales is not None:
            assert torch.equal(row_scales[target].cpu(), expected_scales)
            assert torch.equal(row_scales[rest], getattr(before, f"{name}_scale")[rest])


def check(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    if actual.dtype == torch.bfloat16:
        assert_same(actual.cpu(), expected)
    else:
        assert torch.equal(as_bytes(actual), as_bytes(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_dtype_travels_bit_for_bit(dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8).repeat(
        8 * HEADS * HEAD_DIM * dtype.itemsize // 256 + 1
    )
    rows = bits[: 8 * HEADS * HEAD_DIM * dtype.itemsize].to(DEVICE).view(dtype)
    rows = rows.view(8, HEADS, HEAD_DIM)
    scale = random("triton", 8, HEADS) if dtype in QUANTIZED_DTYPES else None
    pages = KvPages(rows, rows.flip(0) if dtype not in QUANTIZED_DTYPES else rows, scale, scale)
    slots = torch.tensor([7, 0, 3], device=DEVICE)
    data, scales = empty_data(3, dtype)
    kv_pack(pages, slots, data, scales)
    assert torch.equal(as_bytes(data[0]), as_bytes(pages.k)[slots.cpu()])
    assert torch.equal(as_bytes(data[1]), as_bytes(pages.v)[slots.cpu()])
    if scale is not None and scales is not None:
        assert torch.equal(scales[0], scale[slots])


@pytest.mark.skipif(DEVICE != "cuda", reason="on a CPU the public op does not come here")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_public_op_on_a_gpu(dtype: torch.dtype) -> None:
    pages, landed = make_pages(dtype, 8, 1), make_pages(dtype, 8, 5)
    slots = torch.tensor([7, 0, 3], device=DEVICE)
    data, scales = empty_data(3, dtype)
    public.kv_pack(pages, slots, data, scales)
    public.kv_unpack(data, scales, landed, slots)
    assert torch.equal(as_bytes(landed.k)[slots.cpu()], as_bytes(pages.k)[slots.cpu()])
    assert torch.equal(as_bytes(landed.v)[slots.cpu()], as_bytes(pages.v)[slots.cpu()])


def test_no_rows() -> None:
    pages, before = make_pages(torch.int8, 8, 1), make_pages(torch.int8, 8, 1)
    data, scales = empty_data(0, torch.int8)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    kv_pack(pages, none, data, scales)
    kv_unpack(data, scales, pages, none)
    assert torch.equal(pages.k, before.k)


def test_wrong_arguments_are_refused_by_name_and_nothing_is_written() -> None:
    pages, before = make_pages(torch.int8, 8, 1), make_pages(torch.int8, 8, 1)
    slots = torch.tensor([1, 2], device=DEVICE)
    data, scales = empty_data(2, torch.int8)
    assert scales is not None
    wrong: list[tuple[str, Tensor, Tensor | None]] = [
        ("^data must have shape .2, 2, 3, 80., got .2, 1, 3, 80.", data[:, :1], scales),
        ("^data k must have shape .2, 3, 80., got .2, 2, 80.", data[:, :, :2], scales[:, :, :2]),
        ("^scales must have shape", data, scales[:, :1]),
        ("^data k_scale: exactly 8-bit rows", data, None),
        ("^data k_scale: exactly 8-bit rows", data.float(), scales),
        ("^data k_scale must be torch.float32", data, scales.half()),
    ]
    for message, rows, row_scales in wrong:
        with pytest.raises(ValueError, match=message):
            kv_unpack(rows, row_scales, pages, slots)
        with pytest.raises(ValueError, match=message):
            kv_pack(pages, slots, rows, row_scales)
    assert torch.equal(pages.k, before.k)
    with pytest.raises(ValueError, match="data k must be contiguous"):
        kv_pack(
            pages,
            slots,
            torch.empty(2, 2, 6, 80, dtype=torch.int8, device=DEVICE)[:, :, :3],
            scales,
        )
