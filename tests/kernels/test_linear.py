from __future__ import annotations

import pytest
import torch

from legato.kernels.linear import linear, pack_weight


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("size_in", "size_out"), [(1, 1), (64, 96), (577, 33), (1536, 48)])
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_packed_and_plain(num_tokens: int, size_in: int, size_out: int, *, has_bias: bool) -> None:
    weight = torch.randn(size_out, size_in) / size_in**0.5
    bias = torch.randn(size_out) if has_bias else None
    x = torch.randn(num_tokens, size_in)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    for layout in (weight, pack_weight(weight)):
        result = linear(x, layout, bias)
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="only oneDNN packs weights")
def test_cpu_weights_are_packed() -> None:
    assert pack_weight(torch.randn(8, 8)).is_mkldnn


@pytest.mark.parametrize("size_in", [576, 1536])
def test_a_row_alone_has_the_bits_it_has_beside_another(size_in: int) -> None:
    weight = pack_weight(torch.randn(576, size_in))
    x = torch.randn(2, size_in)
    assert torch.equal(linear(x[:1], weight), linear(x, weight)[:1])


def test_bfloat16() -> None:
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    expected = x.float() @ weight.float().t()
    result = linear(x, pack_weight(weight)).float()
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-1)
