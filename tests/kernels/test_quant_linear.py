from __future__ import annotations

import pytest
import torch
from kernel_paths import DEVICE, TOLERANCES, random, with_gaps
from torch import Tensor

from legato.kernels.quant_linear_triton import linear
from legato.kernels.weight import QuantizedWeight

pytestmark = pytest.mark.gpu
# K, N, group size: one step, a ragged last group, groups of no power of two, one group a row,
# several chunks, columns beyond a tile.
# The interpreter multiplies the bits of bf16 as integers.
DTYPES = [dtype for dtype in TOLERANCES if dtype != torch.bfloat16 or DEVICE == "cuda"]
SHAPES = [
    (32, 1, 32),
    (72, 65, 32),
    (96, 7, 24),
    (200, 130, 200),
    (1088, 33, 64),
    (2056, 9, 128),
    (2304, 3, 2304),
]


def quantized(bits: int, num_in: int, num_out: int, group_size: int) -> QuantizedWeight:
    """Random values whose magnitude is about 1 / sqrt(K)."""
    generator = torch.Generator().manual_seed(num_in + num_out)
    shape = (num_out, num_in * bits // 8)
    values = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    groups = -(-num_in // group_size)
    scales = (torch.rand(num_out, groups, generator=generator) + 0.5) / num_in**0.5 / 2**bits * 3
    zeros = torch.randint(0, 2**bits, scales.shape, generator=generator)
    return QuantizedWeight(
        bits,
        num_in,
        group_size,
        values.to(DEVICE),
        scales.to(DEVICE),
        (-scales * zeros).to(DEVICE),
    )


def oracle(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.dequantize().double().t()
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("num_in", "num_out", "group_size"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_product(
    bits: int, num_in: int, num_out: int, group_size: int, dtype: torch.dtype, num_tokens: int
) -> None:
    weight = quantized(bits, num_in, num_out, group_size)
    x = random("triton", num_tokens, num_in, dtype=dtype)
    bias = random("triton", num_out, dtype=dtype, seed=1) if num_out % 2 else None
    out = with_gaps(torch.zeros(num_tokens, num_out, dtype=dtype, device=DEVICE))
    assert linear(with_gaps(x), weight, bias, out) is out
    tolerance = TOLERANCES[dtype] * 3
    torch.testing.assert_close(
        out.double(), oracle(x, weight, bias), rtol=tolerance, atol=tolerance
    )


def test_many_rows_work_through_the_chunks_alone() -> None:
    weight = quantized(8, 1160, 5, 128)
    x, bias = random("triton", 257, 1160), random("triton", 5, seed=1)
    out = linear(x, weight, bias)
    torch.testing.assert_close(out.double(), oracle(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "dtype"), [(4, DTYPES[-1]), (8, DTYPES[-1])])
def test_a_row_has_the_same_bits_in_every_batch(bits: int, dtype: torch.dtype) -> None:
    weight = quantized(bits, 1160, 6, 128)  # two chunks
    x = random("triton", 300, 1160, dtype=dtype)
    alone = [linear(x[row : row + 1], weight, None) for row in (0, 13)]
    for num_tokens in (14, 17, 300):  # tiles of 16 and of 32 rows; chunks apart and in one program
        together = linear(x[:num_tokens], weight, None)
        assert torch.equal(together[0], alone[0][0])
        assert torch.equal(together[13], alone[1][0])


@pytest.mark.parametrize("num_in", [64, 1160])  # in the product's kernel, and in the sum's
def test_accumulate_adds_to_what_is_there(num_in: int) -> None:
    weight = quantized(4, num_in, 5, 32)
    x, bias = random("triton", 3, num_in), random("triton", 5, seed=1)
    out = random("triton", 3, 5, seed=2)
    expected = oracle(x, weight, bias) + out.double()
    assert linear(x, weight, bias, out, accumulate=True) is out
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def test_large_magnitudes_of_padding_do_not_leak() -> None:
    # Rows and columns past the edges are masked, whatever lies behind them in memory.
    weight = quantized(8, 40, 3, 40)
    wide = torch.full((2, 64), torch.inf, device=DEVICE)
    wide[:, :40] = random("triton", 2, 40)
    out = linear(wide[:, :40], weight, None)
    torch.testing.assert_close(
        out.double(), oracle(wide[:, :40], weight, None), rtol=1e-5, atol=1e-5
    )


def test_no_rows_and_strides() -> None:
    weight = quantized(8, 32, 3, 32)
    assert linear(torch.empty(0, 32, device=DEVICE), weight, None).shape == (0, 3)
    with pytest.raises(ValueError, match="a row of x must be contiguous"):
        linear(torch.zeros(32, 2, device=DEVICE).t(), weight, None)
