"""Linear layers with plain weights: against fp64, over odd shapes, and bit for bit over batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from legato.kernels import native
from legato.kernels.linear import linear, pack_weight
from legato.kernels.rows import take_rows
from legato.kernels.weight import PackedWeight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# bf16 kernels round x to bf16 as well: a relative 2^-9 each, averaged over the sum.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 1e-5}
needs_native = pytest.mark.skipif(not native.available(), reason="no C kernels on this machine")


def packed(weight: Tensor) -> PackedWeight:
    result = pack_weight(weight)
    assert isinstance(result, PackedWeight)
    return result


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("size_in", "size_out"), [(1, 1), (64, 96), (577, 33), (1536, 48)])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_and_plain(
    num_tokens: int, size_in: int, size_out: int, dtype: torch.dtype, *, has_bias: bool
) -> None:
    weight = (torch.randn(size_out, size_in) / size_in**0.5).to(dtype)
    bias = torch.randn(size_out) if has_bias else None
    x = torch.randn(num_tokens, size_in)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    for layout in (weight, pack_weight(weight)):
        result = linear(x, layout, bias)
        limit = TOLERANCE[dtype]
        torch.testing.assert_close(result.double(), expected, rtol=limit, atol=limit)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size_in", [1, 2, 31, 63, 65, 576])
def test_packing_keeps_every_element(size_in: int, dtype: torch.dtype) -> None:
    for size_out in (1, 31, 32, 33, 100):
        weight = torch.randn(size_out, size_in).to(dtype)
        pack = packed(weight)
        assert torch.equal(pack.dequantize(), weight.float())
        indices = torch.randint(0, size_out, (7,))
        out = torch.zeros(7, size_in)
        take_rows(pack, indices, out, scale=2.0)
        assert torch.equal(out, weight[indices].float() * 2)
        take_rows(pack, indices, out, add=True)
        assert torch.equal(out, weight[indices].float() * 2 + weight[indices].float())
