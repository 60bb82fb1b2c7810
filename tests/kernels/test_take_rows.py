from __future__ import annotations

import pytest
import torch
from kernel_paths import (
    DEVICE,
    TOLERANCES,
    assert_near,
    assert_same,
    paths_and_dtypes,
    random,
    use_path,
)
from torch import Tensor

from legato.kernels import rows, rows_triton
from legato.kernels.weight import QuantizedWeight

INDICES = [6, 0, 3, 3]


def take(
    path: str, table: Tensor | QuantizedWeight, out: Tensor, scale: float = 1.0, *, add: bool
) -> Tensor:
    indices = torch.tensor(INDICES, device=out.device)
    module = rows_triton if path == "triton" else rows
    return module.take_rows(table, indices, out, scale=scale, add=add)


@pytest.mark.parametrize(("path", "dtype"), paths_and_dtypes())
@pytest.mark.parametrize("table_dtype", list(TOLERANCES))
@pytest.mark.parametrize("width", [1, 96, 577, 1025])
@pytest.mark.parametrize("add", [False, True])
def test_plain_tables(
    path: str,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    add: bool,
) -> None:
    use_path(path, monkeypatch)
    table = random(path, 7, width, dtype=table_dtype)
    out = random(path, 4, width, dtype=dtype, seed=1)
    before = out.double() if add else 0.0
    assert take(path, table, out, 2.5, add=add) is out
    assert_near(out, table[INDICES].double() * 2.5 + before, 2)
    alone = take(path, table, torch.empty_like(out), add=False)
    assert_same(alone, table[INDICES].to(dtype))


@pytest.mark.parametrize("path", ["portable", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("width", "group_size"), [(64, 32), (72, 32), (1096, 1096)])
def test_quantised_tables(path: str, bits: int, width: int, group_size: int) -> None:
    device = DEVICE if path == "triton" else "cpu"
    generator = torch.Generator().manual_seed(0)
    shape = (7, width * bits // 8)
    values = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scales = torch.rand(7, -(-width // group_size), generator=generator)
    offsets = torch.randn(scales.shape, generator=generator)
    table = QuantizedWeight(
        bits, width, group_size, values.to(device), scales.to(device), offsets.to(device)
    )
    expected = table.dequantize()[INDICES]
    out = torch.ones(4, width, device=device)
    take(path, table, out, add=False)
    assert_near(out, expected)
    take(path, table, out, 0.5, add=True)
    assert_near(out, expected * 1.5)


def test_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match=r"out must have shape \(1, 8\), got \(1, 9\)"):
        rows.take_rows(torch.zeros(7, 8), torch.tensor([0]), torch.zeros(1, 9))
