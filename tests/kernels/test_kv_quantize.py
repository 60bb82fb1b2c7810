"""8-bit rows of KV: the error that a scale a head leaves, and C's bits equal to torch's."""

from __future__ import annotations

import pytest
import torch

from legato.kernels import native
from legato.kernels.kv_pages import NATIVE_DTYPES, QUANTIZED_DTYPES, KvPages
from legato.kernels.kv_quantize import LARGEST, dequantize_rows, quantize_rows
from legato.kernels.kv_scatter import kv_scatter


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def rows_of_all_sizes() -> torch.Tensor:
    """[T, 3, 50]: from subnormal to nearly the largest, ties of int8, zeros, and one large one."""
    generator = torch.Generator().manual_seed(0)
    sizes = (1e-42, 1e-38, 1.5e-36, 3e-5, 1.0, 300.0, 1e20, 3e37)
    rows = torch.cat([torch.randn(16, 3, 50, generator=generator) * size for size in sizes])
    ties = (
        torch.arange(-127, 128).float()[torch.randint(255, (8, 3, 50), generator=generator)] + 0.5
    )
    ties[..., 0] = 127.0
    rows = torch.cat([rows, ties.clamp(-127, 127), torch.zeros(1, 3, 50)])
    rows[70, 1, 7] = 1e6
    return rows


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
def test_the_error_is_bounded_by_the_scale(dtype: torch.dtype) -> None:
    rows = rows_of_all_sizes()[48:]
    quantized, scales = quantize_rows(rows, dtype)
    assert scales.shape == rows.shape[:-1]
    error = (dequantize_rows(quantized, scales) - rows).abs()
    if dtype == torch.int8:
        # Half a step, and the rounding of the product.
        assert (error <= scales[..., None] * 0.5001).all()
    else:
        # 3 bits of mantissa: 1 / 16 of the value; below 2^-6 half the smallest subnormal.
        assert (error <= torch.maximum(rows.abs() / 15.9, scales[..., None] * 2.0**-10)).all()
    assert (quantized.float().abs().amax(-1)[rows.abs().amax(-1) > 0] == LARGEST[dtype]).all()


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
def test_zeros_and_rows_too_small_for_a_scale_become_zeros(dtype: torch.dtype) -> None:
    rows = torch.zeros(3, 2, 8)
    rows[1] = 1e-42
    rows[2] = 2e-37
    rows[2, 1] = 1e-30
    quantized, scales = quantize_rows(rows, dtype)
    back = dequantize_rows(quantized, scales)
    assert back.isfinite().all()
    assert not back[:2].any()
    torch.testing.assert_close(back[2, 1], rows[2, 1])


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
def test_a_nan_stays_one(dtype: torch.dtype) -> None:
    rows = torch.ones(2, 2, 20)
    rows[1, 0, 17] = torch.nan
    quantized, scales = quantize_rows(rows, dtype)
    nan = dequantize_rows(quantized, scales).isnan()
    assert nan[1, 0].any()
    assert not nan[0].any()
    assert not nan[1, 1].any()
    if native.available():
        pages = KvPages(*(torch.zeros(2, 2, 20, dtype=dtype) for _ in range(2)),
                        *(torch.zeros(2, 2) for _ in range(2)))  # fmt: skip
        kv_scatter(rows, rows, pages, torch.arange(2))
        assert pages.k_scale is not None
        torch.testing.assert_close(pages.k_scale, scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("head_dim", [50, 48, 6])
def test_scatter_writes_torchs_bits_and_nothing_else(
    dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch, *, portable: bool
) -> None:
    if portable:
        monkeypatch.setattr(native, "available", lambda: False)
    generator = torch.Generator().manual_seed(1)
    k = rows_of_all_sizes()[..., :head_dim]
    num_tokens = k.shape[0]
    # Slices of a fused projection: a token's rows lie in a wider row.
    fused = torch.cat([k, k.flip(0)], 1)
    slots = torch.randperm(num_tokens + 20, generator=generator)[:num_tokens]
    size = (num_tokens + 20, 3, head_dim)
    quantized = dtype in QUANTIZED_DTYPES
    pages = KvPages(
        *(torch.full(size, 1.0).to(dtype) for _ in range(2)),
        *(torch.full(size[:2], 7.0) if quantized else None for _ in range(2)),
    )
    kv_scatter(fused[:, :3], fused[:, 3:], pages, slots)
    rest = torch.ones(size[0], dtype=torch.bool)
    rest[slots] = False
    for new, rows, scales in (
        (fused[:, :3], pages.k, pages.k_scale),
        (fused[:, 3:], pages.v, pages.v_scale),
    ):
        wanted = new.to(dtype)
        if scales is not None:
            wanted, wanted_scales = quantize_rows(new, dtype)
            assert torch.equal(scales[slots], wanted_scales)
            assert (scales[rest] == 7.0).all()
        assert torch.equal(bits(rows[slots]), bits(wanted))
        assert (rows[rest].float() == 1.0).all()


@pytest.mark.skipif(not native.available(), reason="the C kernels are not compiled")
def test_scatter_refuses_what_c_would_not_check() -> None:
    pages = KvPages(torch.zeros(8, 2, 4), torch.zeros(8, 2, 4))
    slots = torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"v must have shape \(2, 2, 4\), got \(3, 2, 4\)"):
        kv_scatter(torch.ones(2, 2, 4), torch.ones(3, 2, 4), pages, slots)
    with pytest.raises(ValueError, match="row of k must be contiguous"):
        kv_scatter(torch.ones(2, 4, 2).transpose(1, 2), torch.ones(2, 2, 4), pages, slots)
    with pytest.raises(ValueError, match=r"slots must be torch\.int64"):
        kv_scatter(torch.ones(2, 2, 4), torch.ones(2, 2, 4), pages, slots.int())
    assert not pages.k.any()


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
def test_pages_need_scales_exactly_with_8_bits(dtype: torch.dtype) -> None:
    rows = torch.zeros(4, 1, 2, dtype=dtype)
    with pytest.raises(ValueError, match="need scales"):
        KvPages(rows, rows)
    with pytest.raises(ValueError, match="need scales"):
        KvPages(rows.float(), rows.float(), torch.zeros(4, 1), torch.zeros(4, 1))
