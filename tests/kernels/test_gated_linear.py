"""Gated linear layers: against fp64, against linear and activation one by one, and bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from kernel_paths import needs_native, use_path
from quantized_weights import random_quantized, rounded
from torch import Tensor

from legato.kernels import native, reference
from legato.kernels.gated import gelu_mul, silu_mul
from legato.kernels.gated_linear import GatedActivation, gated_linear
from legato.kernels.linear import linear, pack_weight
from legato.kernels.rows import take_rows
from legato.kernels.weight import PackedWeight, QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from legato.kernels.weight import Weight

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Beside floats: bits, group size (0: the row) and offsets of quantised ones.
QUANTIZED = {
    "q8": (8, 0, "symmetric"),
    "q8 g32": (8, 32, "fp32"),
    "q4 g32": (4, 32, "symmetric"),
    "q4 g64 zeros": (4, 64, "zero points"),
}
KINDS = (*DTYPES, *QUANTIZED)
SIZE_IN = 136  # no multiple of a line, nor of a group
kinds = pytest.mark.parametrize("kind", KINDS)
activations = pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])


def make(kind: str, width: int, size_in: int = SIZE_IN) -> Tensor | QuantizedWeight:
    """A weight [2 * width, size_in] from a fixed seed; its products with x are of size 1."""
    generator = torch.Generator().manual_seed(width)
    if kind in DTYPES:
        values = torch.randn(2 * width, size_in, generator=generator)
        return (values / size_in**0.5).to(DTYPES[kind])
    bits, group, offsets = QUANTIZED[kind]
    weight = random_quantized(
        2 * width, size_in, bits, group or size_in, offsets, generator=generator
    )
    # Powers of two: scales stay exact in fp16.
    size = 2.0 ** -round(float(weight.dequantize().norm(dim=1).mean().log2()))
    return QuantizedWeight(
        bits, size_in, weight.group_size, weight.values, weight.scales * size, weight.offsets * size
    )


def inputs(num_rows: int, size_in: int = SIZE_IN) -> Tensor:
    return torch.randn(num_rows, size_in, generator=torch.Generator().manual_seed(num_rows))


def packed(weight: Tensor | QuantizedWeight) -> PackedWeight:
    result = pack_weight(weight, gated=True)
    assert isinstance(result, PackedWeight)
    assert result.gated
    return result


def one_by_one(x: Tensor, weight: Weight, activation: str, bias: Tensor | None) -> Tensor:
    return (silu_mul if activation == "silu" else gelu_mul)(linear(x, weight, bias))


@kinds
@activations
@pytest.mark.parametrize("width", [1, 8, 24, 100, 1536])
@pytest.mark.parametrize("path", [pytest.param("native", marks=needs_native), "portable"])
def test_against_fp64(
    path: str, width: int, activation: GatedActivation, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    weight = make(kind, width)
    layout = pack_weight(weight, gated=True)
    group = 0 if kind in DTYPES else QUANTIZED[kind][1] or 128  # of x that share a scale
    assert isinstance(layout, PackedWeight) == (path == "native")
    wide = weight if isinstance(weight, Tensor) else weight.dequantize()
    for num_rows in range(31) if path == "native" and width < 1536 else (1, 2, 13, 30):
        x = inputs(num_rows).bfloat16().float()  # exact where kernels round it to bf16
        bias = None if num_rows % 3 == 0 else inputs(1, 2 * width)[0]
        seen = rounded(x, group) if group and path == "native" else x
        expected = reference.gated_linear(seen, wide, activation, bias)
        result = gated_linear(x, layout, activation, bias)
        assert result.shape == (num_rows, width)
        torch.testing.assert_close(result.double(), expected, rtol=2e-5, atol=2e-5)


@needs_native
@kinds
@activations
def test_bits_are_those_of_linear_and_the_activation(
    activation: GatedActivation, kind: str
) -> None:
    for width, num_rows in ((8, 5), (24, 1), (100, 30), (1536, 14)):
        weight, x, bias = make(kind, width), inputs(num_rows), torch.randn(2 * width)
        expected = one_by_one(x, pack_weight(weight), activation, bias)
        assert torch.equal(gated_linear(x, packed(weight), activation, bias), expected)


@needs_native
@kinds
def test_packing_keeps_every_weight(kind: str) -> None:
    for width in (1, 8, 16, 24, 100):
        weight = make(kind, width)
        pack = packed(weight)
        wide = weight.float() if isinstance(weight, Tensor) else weight.dequantize()
        assert torch.equal(pack.dequantize(), wide)
        plain = pack_weight(weight)
        assert isinstance(plain, PackedWeight)
        assert pack.num_bytes == plain.num_bytes


@pytest.fixture
def threads() -> Iterator[None]:
    """Gives torch its number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_native
@pytest.mark.usefixtures("threads")
@kinds
def test_bits_depend_on_no_other_row_and_no_threads(kind: str) -> None:
    weight, x, bias = packed(make(kind, 1100)), inputs(130), torch.randn(2200)
    torch.set_num_threads(1)
    crowd = gated_linear(x, weight, "silu", bias)
    assert torch.equal(gated_linear(x.flip(0), weight, "silu", bias).flip(0), crowd)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(gated_linear(x, weight, "silu", bias), crowd)
        for count in (1, 2, 3, 7, 12, 13, 25, 32):
            for first in (0, 41, 130 - count):
                batch = gated_linear(x[first : first + count], weight, "silu", bias)
                assert torch.equal(batch, crowd[first : first + count])


@needs_native
@kinds
@pytest.mark.parametrize("width", [8, 24, 100])
def test_nothing_beside_out_is_written(width: int, kind: str) -> None:
    weight, x = packed(make(kind, width)), inputs(15)
    frame = torch.full((17, width + 10), 3.0)
    out = frame[1:16, 5:-5]
    assert gated_linear(x, weight, "silu", out=out) is out
    assert torch.equal(out, gated_linear(x, weight, "silu"))
    out.fill_(3.0)
    assert (frame == 3.0).all()


@needs_native
def test_a_recorded_program_reads_new_inputs() -> None:
    weight, x, out = packed(make("bf16", 40)), inputs(3), torch.empty(3, 40)
    with native.record() as program:
        gated_linear(x, weight, "gelu_tanh", out=out)
    assert program.num_ops == 1
    x.copy_(torch.randn(x.shape))
    program.run(2)
    assert torch.equal(out, gated_linear(x, weight, "gelu_tanh"))


@needs_native
def test_what_does_not_fit_is_refused_by_name() -> None:
    plain = make("f32", 8, 16)
    weight, x = packed(plain), torch.randn(2, 16)
    with pytest.raises(ValueError, match=r"x must have shape \(T, 16\), got \(2, 15\)"):
        gated_linear(x[:, :15], weight, "silu")
    with pytest.raises(ValueError, match=r"bias must have shape \(16,\), got \(8,\)"):
        gated_linear(x, weight, "silu", torch.zeros(8))
    with pytest.raises(ValueError, match=r"out must have shape \(2, 8\), got \(2, 16\)"):
        gated_linear(x, weight, "silu", out=torch.empty(2, 16))
    with pytest.raises(ValueError, match="activation must be one of silu, gelu_tanh, got 'relu'"):
        gated_linear(x, weight, "relu")  # type: ignore[arg-type]  # that is the test
    with pytest.raises(ValueError, match="weight must be packed with gated=True"):
        gated_linear(x, pack_weight(plain), "silu")
    with pytest.raises(ValueError, match="packed with gated=True is for gated_linear"):
        linear(x, weight)
    with pytest.raises(ValueError, match="no rows are taken of a weight packed with gated=True"):
        take_rows(weight, torch.tensor([1]), torch.empty(1, 16))
    for odd in (torch.ones(7, 16), random_quantized(7, 16, 8, 16)):
        with pytest.raises(ValueError, match="must have an even number of rows, got 7"):
            pack_weight(odd, gated=True)


_DIGEST = """
import hashlib
from test_gated_linear import inputs, make, packed
from legato.kernels.gated_linear import gated_linear
for kind in {kinds}:
    for activation in ("silu", "gelu_tanh"):
        result = gated_linear(inputs(14), packed(make(kind, 100)), activation, inputs(1, 200)[0])
        print(hashlib.sha256(result.numpy().tobytes()).hexdigest())
"""


@needs_native
def test_every_level_of_instructions() -> None:
    """The same bits but for bf16, of which the best level rounds x."""
    found = {}
    kinds = [kind for kind in KINDS if kind != "bf16"]
    for level in native.levels():
        paths = [os.path.dirname(__file__), *sys.path]
        run = subprocess.run(
            [sys.executable, "-c", _DIGEST.format(kinds=kinds)],
            env={**os.environ, "LEGATO_CPU_LEVEL": level, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found[level] = run.stdout.split()
    assert len(set(map(tuple, found.values()))) == 1, found
    assert all(len(lines) == 2 * len(kinds) for lines in found.values())
