"""Linear layers with plain weights: against fp64, over odd shapes, and bit for bit over batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from legato.kernels import native
from legato.kernels.linear import linear, pack_weight, set_deterministic
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


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_with_strides_is_written_or_added_to_and_nothing_beside_it(dtype: torch.dtype) -> None:
    weight = torch.randn(70, 40).to(dtype)
    x, bias = torch.randn(15, 40), torch.randn(70)
    frame = torch.full((17, 80), 3.0)
    out = frame[1:16, 5:75]
    pack = packed(weight)
    linear(x, pack, bias, out)
    assert torch.equal(out, linear(x, pack, bias))
    linear(x, pack, bias, out, accumulate=True)
    twice = 2 * linear(x, pack, bias)
    torch.testing.assert_close(out, twice, rtol=1e-4, atol=1e-4)
    out.fill_(3.0)
    assert (frame == 3.0).all()


@needs_native
def test_more_rows_than_one_operation_takes() -> None:
    weight, x = torch.randn(5, 16), torch.randn(2 * 2048 + 3, 16)
    result = linear(x, pack_weight(weight))
    torch.testing.assert_close(result, x @ weight.t(), rtol=1e-5, atol=1e-5)


@needs_native
def test_weights_of_any_stride_are_packed() -> None:
    whole = torch.randn(50, 90)
    for weight in (whole[:, 3:70], whole.t(), whole[::2]):
        assert torch.equal(packed(weight).dequantize(), weight)


@needs_native
def test_a_recorded_program_reads_new_inputs() -> None:
    weight, x = packed(torch.randn(64, 32).bfloat16()), torch.randn(3, 32)
    out = torch.empty(3, 64)
    with native.record() as program:
        linear(x, weight, out=out)
    x.copy_(torch.randn(3, 32))
    program.run(2)
    assert torch.equal(out, linear(x, weight))
    with native.record(), pytest.raises(RuntimeError, match="the weight is not packed"):
        linear(x, weight.dequantize(), out=out)


@needs_native
def test_what_does_not_fit_is_refused_by_name() -> None:
    weight, x = packed(torch.randn(8, 16)), torch.randn(2, 16)
    with pytest.raises(ValueError, match=r"x must have shape \(T, 16\), got \(2, 15\)"):
        linear(x[:, :15], weight)
    with pytest.raises(ValueError, match=r"bias must have shape \(8,\), got \(7,\)"):
        linear(x, weight, torch.zeros(7))
    with pytest.raises(ValueError, match=r"out must have shape \(2, 8\), got \(3, 8\)"):
        linear(x, weight, out=torch.empty(3, 8))
    with pytest.raises(ValueError, match=r"x must be fp32 on the CPU, got torch\.bfloat16"):
        linear(x.bfloat16(), weight)
    with pytest.raises(ValueError, match="a row of x must be contiguous"):
        linear(torch.randn(16, 2).t(), weight)
    with pytest.raises(ValueError, match="accumulate needs out"):
        linear(x, weight, accumulate=True)
    with pytest.raises(ValueError, match=r"a weight must be a matrix .*, got shape \(0, 4\)"):
        pack_weight(torch.empty(0, 4))
    with pytest.raises(
        ValueError, match=r"a weight must be fp32, bf16 or fp16, got torch\.float64"
    ):
        pack_weight(torch.zeros(4, 4, dtype=torch.float64))


@pytest.mark.parametrize("has_bias", [True, False])
def test_deterministic_plain_weights_have_the_same_bits_in_any_batch(*, has_bias: bool) -> None:
    weight, x = torch.randn(300, 1536), torch.randn(33, 1536)
    bias = torch.randn(300) if has_bias else None
    free = linear(x, weight, bias)
    set_deterministic(enabled=True)
    try:
        together = linear(x, weight, bias)
        for row in (0, 7, 32):
            assert torch.equal(linear(x[row : row + 1], weight, bias)[0], together[row])
        assert linear(x[:0], weight, bias).shape == (0, 300)
    finally:
        set_deterministic(enabled=False)
    torch.testing.assert_close(together, free, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(not native.available(), reason="no C kernels on this machine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_sums_are_as_exact_as_those_of_torch(dtype: torch.dtype) -> None:
    x = torch.randn(16, 8192).bfloat16().float()  # exact in either form of x
    weight = torch.randn(512, 8192).to(dtype)
    exact = x.double() @ weight.double().T
    ours = (linear(x, pack_weight(weight)).double() - exact).abs().mean()
    torchs = ((x @ weight.float().T).double() - exact).abs().mean()
    assert ours < 1.5 * torchs  # 5 times it with one sum from end to end
