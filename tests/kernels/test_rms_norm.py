from __future__ import annotations

import pytest
import torch
from kernel_paths import assert_near, assert_same, paths_and_dtypes, random, use_path, with_gaps
from torch import Tensor

from legato.kernels import reference, rms_norm, rms_norm_triton

EPS = 1e-3  # large enough to be seen where it is left out
WIDTHS = [(1, 1), (1, 64), (5, 96), (3, 577), (2, 1025)]
paths = pytest.mark.parametrize(("path", "dtype"), paths_and_dtypes())


def norm(path: str, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    module = rms_norm_triton if path == "triton" else rms_norm
    return module.rms_norm(x, weight, EPS, out)


@paths
@pytest.mark.parametrize(("num_tokens", "width"), WIDTHS)
def test_rms_norm(
    path: str, dtype: torch.dtype, num_tokens: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    x = random(path, num_tokens, width, dtype=dtype) * 0.1
    weight = random(path, width, dtype=dtype, seed=1)
    expected = reference.rms_norm(x.double(), weight, EPS)
    strided, out = with_gaps(x), with_gaps(torch.zeros_like(x))
    assert norm(path, strided, weight, out) is out
    assert_near(out, expected)
    assert torch.equal(strided, x)
    norm(path, strided, weight, strided)  # in place
    assert_near(strided, expected)


@paths
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_each_head_is_normalised_alone_and_in_place(
    path: str, dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    fused = random(path, 3, 6, head_dim, dtype=dtype)
    fused *= torch.arange(1, 7, device=fused.device)[:, None]  # heads of different sizes
    before, weight = fused.clone(), random(path, head_dim, dtype=dtype, seed=1)
    heads = fused[:, 1:5]
    norm(path, heads, weight, heads)
    assert_near(fused[:, 1:5], reference.rms_norm(before[:, 1:5].double(), weight, EPS))
    assert torch.equal(fused[:, [0, 5]], before[:, [0, 5]])


@paths
@pytest.mark.parametrize(("num_tokens", "width"), WIDTHS)
def test_add_rms_norm(
    path: str, dtype: torch.dtype, num_tokens: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    module = rms_norm_triton if path == "triton" else rms_norm
    x = random(path, num_tokens, width, dtype=dtype)
    residual = random(path, num_tokens, width, dtype=dtype, seed=2) * 3
    weight = random(path, width, dtype=dtype, seed=1)
    summed = residual + x
    expected = reference.rms_norm(summed.double(), weight, EPS)
    assert module.add_rms_norm(x, residual, weight, EPS, x) is x  # out is the input
    assert_same(residual, summed)
    assert_near(x, expected)


@paths
@pytest.mark.parametrize(("num_tokens", "width"), WIDTHS)
def test_rms_norm_add(
    path: str, dtype: torch.dtype, num_tokens: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    module = rms_norm_triton if path == "triton" else rms_norm
    x = random(path, num_tokens, width, dtype=dtype)
    residual = random(path, num_tokens, width, dtype=dtype, seed=2) * 3
    weight = random(path, width, dtype=dtype, seed=1)
    expected = residual.double() + reference.rms_norm(x.double(), weight, EPS)
    before = x.clone()
    module.rms_norm_add(x, residual, weight, EPS)
    assert_near(residual, expected)
    assert torch.equal(x, before)


@paths
@pytest.mark.parametrize("width", [96, 577])
def test_a_row_has_the_same_bits_in_any_company(
    path: str, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    x, weight = random(path, 9, width, dtype=dtype), random(path, width, dtype=dtype, seed=1)
    together = norm(path, x, weight, torch.empty_like(x))
    for row in (0, 4, 8):
        alone = x[row : row + 1].clone()
        assert torch.equal(norm(path, alone, weight, alone)[0], together[row])


@pytest.mark.parametrize("width", [64, 577])
def test_a_row_without_elements_to_spare_overflows_nothing(width: int) -> None:
    x = torch.full((1, width), 1e15)
    out = rms_norm.rms_norm(x, torch.ones(width), 0.0)
    assert_near(out, torch.ones(1, width))


def test_no_rows() -> None:
    for module in (rms_norm, rms_norm_triton):
        empty = torch.empty(0, 8)
        assert module.rms_norm(empty, torch.ones(8), EPS, empty).shape == (0, 8)


def test_strides_that_no_kernel_reads_are_refused() -> None:
    turned, weight = torch.zeros(4, 6).t(), torch.ones(4)
    flat = torch.zeros(6, 4)
    for module in (rms_norm, rms_norm_triton):
        with pytest.raises(ValueError, match="a row of x must be contiguous"):
            module.rms_norm(turned, weight, EPS, flat)
        with pytest.raises(ValueError, match="residual must be contiguous"):
            module.add_rms_norm(flat, turned, weight, EPS, flat)
        with pytest.raises(ValueError, match="residual must be contiguous"):
            module.rms_norm_add(flat, turned, weight, EPS)


def test_shapes_must_fit() -> None:
    x, weight = torch.zeros(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"weight must have shape \(8,\), got \(7,\)"):
        rms_norm.rms_norm(x, weight[:7], EPS)
    with pytest.raises(ValueError, match=r"out must have shape \(2, 8\), got \(1, 8\)"):
        rms_norm.rms_norm(x, weight, EPS, x[:1])
    with pytest.raises(ValueError, match=r"residual must have shape \(2, 8\), got \(1, 8\)"):
        rms_norm.add_rms_norm(x, x[:1], weight, EPS)
