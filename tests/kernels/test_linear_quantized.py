"""Linear layers with 8- and 4-bit weights against fp64, and their packing."""

from __future__ import annotations

import pytest
import torch
from quantized_weights import OFFSETS, random_quantized, rounded

from legato.kernels import native
from legato.kernels.linear import linear, pack_weight
from legato.kernels.rows import take_rows
from legato.kernels.weight import PackedWeight, QuantizedWeight

needs_native = pytest.mark.skipif(not native.available(), reason="no C kernels on this machine")

# (K, group): one group a row, ragged last groups, and groups of which none is a power of two.
GROUPS = [(8, 8), (64, 32), (72, 16), (200, 96), (520, 256), (576, 64), (576, 576), (1040, 128)]
ACTIVATION_GROUP = {16: 16, 32: 32, 64: 64, 96: 32, 128: 128, 256: 128}


def packed(weight: QuantizedWeight) -> PackedWeight:
    result = pack_weight(weight)
    assert isinstance(result, PackedWeight)
    return result


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize(("size_in", "group"), GROUPS)
def test_against_fp64(size_in: int, group: int, offsets: str, bits: int) -> None:
    x = torch.randn(14, size_in + 3)[:, :size_in]
    for size_out, half_scales in ((1, True), (33, False), (96, True)):
        weight = random_quantized(size_out, size_in, bits, group, offsets, half_scales=half_scales)
        bias = torch.randn(size_out)
        wide = weight.dequantize().double()
        # What the two sides may differ by: fp32 sums over K.
        limit = 1e-6 * x.norm(dim=1).max() * wide.norm(dim=1).max()
        plain = linear(x, weight, bias).double() - bias
        torch.testing.assert_close(plain, x.double() @ wide.t(), rtol=0, atol=limit.item())
        if native.available():
            activation_group = 128 if group >= size_in else ACTIVATION_GROUP[group]
            expected = rounded(x, activation_group) @ wide.t() + bias
            result = linear(x, pack_weight(weight), bias).double()
            torch.testing.assert_close(result, expected, rtol=1e-6, atol=limit.item())


@needs_native
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("half_scales", [True, False])
def test_packing_keeps_every_weight(bits: int, offsets: str, *, half_scales: bool) -> None:
    for size_in, group in GROUPS:
        weight = random_quantized(33, size_in, bits, group, offsets, half_scales=half_scales)
        pack = packed(weight)
        assert torch.equal(pack.dequantize(), weight.dequantize())
        indices = torch.randint(0, 33, (5,))
        out = torch.empty(5, size_in)
        take_rows(pack, indices, out)
        torch.testing.assert_close(out, weight.dequantize()[indices], rtol=1e-6, atol=1e-6)


@needs_native
def test_symmetric_weights_store_no_offsets_and_half_scales_where_they_are_exact() -> None:
    pack = packed(random_quantized(64, 256, 4, 32))
    assert pack.offsets is None
    assert pack.zero == 8
    assert pack.num_bytes == 64 * 256 // 2 + 64 * 256 // 32 * 2
    pack = packed(random_quantized(64, 256, 4, 32, "zero points", half_scales=False))
    assert pack.offsets is not None
    assert pack.offsets.dtype == torch.uint8
    assert pack.num_bytes == 64 * 256 // 2 + 64 * 256 // 32 * (4 + 1)


@needs_native
@pytest.mark.parametrize("bits", [8, 4])
def test_extreme_rows(bits: int) -> None:
    """Zeros give zeros, tiny and huge values their product, a NaN or an infinity a NaN."""
    weight = random_quantized(40, 256, bits, 128)
    x = torch.randn(6, 256)
    x[0] = 0
    x[1] *= 1e-25
    x[2] *= 1e30
    x[3, 200] = float("nan")
    x[4, 3] = float("-inf")
    x[5, :128] = 1e-38  # a whole group below what has an inverse
    result = linear(x, pack_weight(weight))
    assert (result[0] == 0).all()
    wide = weight.dequantize().double()
    seen = rounded(x, 128)
    seen[5, :128] = 0
    for row in (1, 2, 5):
        expected = seen[row] @ wide.t()
        limit = 1e-6 * seen[row].norm() * wide.norm(dim=1).max()
        torch.testing.assert_close(result[row].double(), expected, rtol=1e-6, atol=limit.item())
    assert result[3:5].isnan().all()


@needs_native
def test_a_group_that_is_no_multiple_of_8_is_refused() -> None:
    with pytest.raises(ValueError, match="group_size must be a multiple of 8, got 12"):
        pack_weight(random_quantized(8, 24, 8, 12))
