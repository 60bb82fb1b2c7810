from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_paths import assert_near, paths_and_dtypes, random, use_path, with_gaps
from torch import Tensor

from legato.kernels import gated, gated_triton, reference

# The interpreter's, where e^x overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
paths = pytest.mark.parametrize(("path", "dtype"), paths_and_dtypes())
kinds = pytest.mark.parametrize("kind", ["silu_mul", "gelu_mul", "gelu"])


def activate(path: str, kind: str, x: Tensor, out: Tensor) -> Tensor:
    if path == "triton":
        return gated_triton.activate(kind, x, out)
    function = {"silu_mul": gated.silu_mul, "gelu_mul": gated.gelu_mul, "gelu": gated.gelu}[kind]
    return function(x, out)


def oracle(kind: str, x: Tensor) -> Tensor:
    wide = x.double()
    if kind == "silu_mul":
        return reference.silu_mul(wide)
    if kind == "gelu":
        return F.gelu(wide, approximate="tanh")
    gate, up = wide.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


@paths
@kinds
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (3, 96), (2, 577), (2, 1025)])
def test_activations(
    path: str,
    dtype: torch.dtype,
    kind: str,
    num_tokens: int,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_path(path, monkeypatch)
    x = random(path, num_tokens, width * (1 if kind == "gelu" else 2), dtype=dtype) * 4
    out = with_gaps(torch.zeros(num_tokens, width, dtype=dtype, device=x.device))
    assert activate(path, kind, with_gaps(x), out) is out
    # torch rounds the activation before it multiplies: twice the tolerance, of products to 16.
    assert_near(out, oracle(kind, x), 2)


@paths
@kinds
def test_large_magnitudes_saturate(
    path: str, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    gate = torch.tensor([-6e4, -200.0, -88.0, -0.0, 88.0, 200.0, 6e4]).to(dtype)
    x = gate if kind == "gelu" else torch.cat((gate, torch.ones_like(gate)))
    x = x[None].to(random(path, 1).device)
    out = activate(path, kind, x, x.new_empty(1, 7))
    assert_near(out, oracle(kind, x))


@paths
def test_gelu_in_place(path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    use_path(path, monkeypatch)
    x = random(path, 3, 96, dtype=dtype)
    expected = oracle("gelu", x)
    activate(path, "gelu", x, x)
    assert_near(x, expected)


def test_shapes_and_strides_must_fit() -> None:
    with pytest.raises(ValueError, match=r"out must have shape \(2, 4\), got \(2, 8\)"):
        gated.silu_mul(torch.zeros(2, 8), torch.zeros(2, 8))
    for kind in ("silu_mul", "gelu_mul"):
        with pytest.raises(ValueError, match="a row of x must be contiguous"):
            gated_triton.activate(kind, torch.zeros(8, 2).t(), torch.zeros(2, 4))
