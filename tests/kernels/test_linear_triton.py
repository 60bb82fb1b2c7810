from __future__ import annotations

import pytest
import torch

from legato.kernels import linear_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(num_rows: int, depth: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_rows + depth + columns)
    x = torch.randn(num_rows, depth + 8, generator=generator)[:, :depth]
    weight = torch.randn(columns, depth, generator=generator) / depth**0.5
    bias = torch.randn(columns, generator=generator)
    return tuple(t.to(dtype).to(DEVICE) for t in (x, weight, bias))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-3)])
@pytest.mark.parametrize("shape", [(0, 8, 8), (1, 1, 1), (3, 577, 33), (33, 64, 96), (70, 96, 65)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_values(
    dtype: torch.dtype, tolerance: float, shape: tuple[int, int, int], *, has_bias: bool
) -> None:
    x, weight, bias = make(*shape, dtype)
    out = torch.empty(shape[0], shape[2], dtype=dtype, device=DEVICE)
    linear_triton.linear(x, weight, bias if has_bias else None, out)
    expected = x.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_row_has_the_same_bits_alone_and_anywhere_in_a_batch() -> None:
    x, weight, bias = make(70, 300, 96, torch.float32)
    together = linear_triton.linear(x, weight, bias, torch.empty(70, 96, device=DEVICE))
    for row in (0, 31, 32, 69):
        alone = linear_triton.linear(
            x[row : row + 1], weight, bias, torch.empty(1, 96, device=DEVICE)
        )
        assert torch.equal(alone[0], together[row])
