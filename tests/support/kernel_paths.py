"""The paths that an op can take, and the dtypes of each, as parameters of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from legato.kernels import native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
needs_native = pytest.mark.skipif(not native.available(), reason="no C kernels for this CPU")


def paths_and_dtypes() -> list[object]:
    """(path, dtype): C takes fp32 alone; "triton" is interpreted where there is no device."""
    dtypes = list(TOLERANCES)
    return [
        pytest.param("native", torch.float32, marks=needs_native),
        *(pytest.param("portable", dtype) for dtype in dtypes),
        *(pytest.param("triton", dtype, marks=pytest.mark.gpu) for dtype in dtypes),
    ]


def use_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rest of the test CPU ops take that path; Triton's launchers are called themselves."""
    if path == "portable":
        monkeypatch.setattr(native, "available", lambda: False)


def random(
    path: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int | None = None
) -> Tensor:
    """Standard normal, the same for the same shape and seed, on the path's device."""
    generator = torch.Generator().manual_seed(sum(shape) if seed is None else seed)
    values = torch.randn(*shape, generator=generator).to(dtype)
    return values.to(DEVICE if path == "triton" else "cpu")


def assert_near(actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Within the tolerance of `actual`'s dtype, times `scale`."""
    tolerance = TOLERANCES[actual.dtype] * scale
    torch.testing.assert_close(
        actual.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=tolerance
    )


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Bit for bit; near for bf16 in Triton's interpreter, which truncates where devices round."""
    if actual.dtype == torch.bfloat16 and DEVICE == "cpu":
        assert_near(actual, expected, 0.5)
    else:
        assert torch.equal(actual, expected)


def with_gaps(x: Tensor, gap: int = 3) -> Tensor:
    """A copy of x [T, ...] whose rows lie `gap` elements apart; the gaps hold NaN."""
    flat = x.reshape(x.shape[0], -1)
    wide = flat.new_full((x.shape[0], flat.shape[1] + gap), torch.nan)
    wide[:, : flat.shape[1]] = flat
    strides: Sequence[int] = (wide.stride(0), *x.contiguous().stride()[1:])
    return torch.as_strided(wide, x.shape, strides)
