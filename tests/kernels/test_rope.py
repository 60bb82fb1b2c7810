from __future__ import annotations

import pytest
import torch
from kernel_paths import DEVICE, assert_near, needs_native, paths_and_dtypes, random, use_path
from torch import Tensor

from legato.kernels import reference, rope, rope_triton


def tables_of(
    head_dim: int, positions: Tensor, scale: float = 1.0, *, path: str = "native"
) -> tuple[Tensor, Tensor]:
    """The inverse frequencies of base 10,000 and their tables."""
    frequencies = 1.0 / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)
    module, device = (rope_triton, DEVICE) if path == "triton" else (rope, "cpu")
    out = torch.full((len(positions), 2, head_dim // 2), torch.nan, device=device)
    module.rotation_tables(positions.to(device), frequencies.to(device), out, scale=scale)
    return frequencies, out


@pytest.mark.parametrize(("path", "dtype"), paths_and_dtypes())
@pytest.mark.parametrize("head_dim", [2, 16, 80, 96, 256])
def test_rope_turns_the_first_heads_and_nothing_else(
    path: str, dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    fused = random(path, 3, 9, head_dim, dtype=dtype)
    heads, untouched = fused[:, :7], fused[:, 7:].clone()
    positions = torch.tensor([0, 1, 700])
    frequencies, tables = tables_of(head_dim, positions)
    expected = reference.apply_rope(heads.cpu().float(), positions, frequencies)
    module = rope_triton if path == "triton" else rope
    module.apply_rope(heads, tables.to(heads.device))
    assert_near(heads, expected, 3)
    assert torch.equal(fused[:, 7:], untouched)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("native", marks=needs_native),
        "portable",
        pytest.param("triton", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 256])
def test_tables_are_those_of_fp64_angles(
    path: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    positions = torch.tensor([0, 5, 131_071, 4, 1_048_575])
    frequencies, tables = tables_of(head_dim, positions, 1.25, path=path)
    angles = (positions.float()[:, None] * frequencies).double()  # the product is fp32's
    assert_near(tables[:, 0], 1.25 * angles.cos(), 0.1)
    assert_near(tables[:, 1], 1.25 * angles.sin(), 0.1)


def test_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match=r"tables must have shape \(2, 2, 4\), got \(1, 2, 4\)"):
        rope.apply_rope(torch.zeros(2, 3, 8), torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match=r"out must have shape \(2, 2, 4\), got \(2, 2, 5\)"):
        rope.rotation_tables(torch.tensor([0, 1]), torch.ones(4), torch.zeros(2, 2, 5))
    with pytest.raises(ValueError, match=r"out must have shape \(2, 2, 4\), got \(2, 2, 5\)"):
        rope_triton.rotation_tables(
            torch.tensor([0, 1]), torch.ones(4), torch.zeros(2, 2, 5), scale=1.0
        )
    with pytest.raises(ValueError, match=r"out must be torch\.float32, got torch\.bfloat16"):
        rope.rotation_tables(torch.tensor([0, 1]), torch.ones(4), torch.zeros(2, 2, 4).bfloat16())
    with pytest.raises(ValueError, match="inverse_frequencies must be contiguous"):
        rope.rotation_tables(torch.tensor([0, 1]), torch.ones(8)[::2], torch.zeros(2, 2, 4))
    apart = torch.zeros(2, 8, 3).transpose(1, 2)
    for module in (rope, rope_triton):
        with pytest.raises(ValueError, match="a row of heads must be contiguous"):
            module.apply_rope(apart, torch.zeros(2, 2, 4))
