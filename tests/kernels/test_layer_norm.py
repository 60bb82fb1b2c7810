from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_paths import assert_near, assert_same, paths_and_dtypes, random, use_path
from torch import Tensor

from legato.kernels import layer_norm_triton
from legato.kernels.layer_norm import add_layer_norm, layer_norm

EPS = 1e-3
paths = pytest.mark.parametrize(("path", "dtype"), paths_and_dtypes())


def norm(
    path: str, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, out: Tensor
) -> Tensor:
    if path == "triton":
        return layer_norm_triton.layer_norm(x, residual, weight, bias, EPS, out)
    if residual is None:
        return layer_norm(x, weight, bias, EPS, out)
    return add_layer_norm(x, residual, weight, bias, EPS, out)


def oracle(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x.double(), (x.shape[-1],), weight.double(), bias.double(), EPS)


@paths
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (1, 64), (5, 96), (3, 577), (2, 1025)])
@pytest.mark.parametrize("add", [False, True])
def test_layer_norm(
    path: str,
    dtype: torch.dtype,
    num_tokens: int,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    add: bool,
) -> None:
    use_path(path, monkeypatch)
    x = random(path, num_tokens, width, dtype=dtype) + 1.5
    residual = random(path, num_tokens, width, dtype=dtype, seed=2) * 3
    weight = random(path, width, dtype=dtype, seed=1)
    bias = random(path, width, dtype=dtype, seed=3)
    summed = residual + x if add else x
    expected = oracle(summed, weight, bias)
    out = torch.empty_like(x)
    assert norm(path, x, residual if add else None, weight, bias, out) is out
    assert_near(out, expected, 2)
    if add:
        assert_same(residual, summed)
    norm(path, x, residual if add else None, weight, bias, x)  # in place
    expected = oracle(residual, weight, bias) if add else expected
    assert_near(x, expected, 2)


@paths
def test_a_mean_far_from_zero_cancels_nothing(
    path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    width = 100  # no multiple of the lanes: what lies past the end must not count
    x = (random(path, 2, width) + 300).to(dtype)
    one, zero = torch.ones_like(x[0]), torch.zeros_like(x[0])
    out = norm(path, x, None, one, zero, torch.empty_like(x))
    # The mean in fp32 is exact to some 2e-5, of values whose deviation is 1.
    assert_near(out, oracle(x, one, zero), 10)


@paths
def test_a_row_has_the_same_bits_in_any_company(
    path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    x, weight = random(path, 9, 577, dtype=dtype), random(path, 577, dtype=dtype, seed=1)
    together = norm(path, x, None, weight, weight, torch.empty_like(x))
    for row in (0, 4, 8):
        alone = x[row : row + 1].clone()
        assert torch.equal(norm(path, alone, None, weight, weight, alone)[0], together[row])


def test_shapes_and_strides_must_fit() -> None:
    x, row = torch.zeros(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"bias must have shape \(8,\), got \(7,\)"):
        layer_norm(x, row, row[:7], EPS)
    with pytest.raises(ValueError, match=r"residual must have shape \(2, 8\), got \(1, 8\)"):
        add_layer_norm(x, x[:1], row, row, EPS)
    turned = torch.zeros(8, 2).t()
    with pytest.raises(ValueError, match="residual must be contiguous"):
        layer_norm_triton.layer_norm(x, turned, row, row, EPS, x)
