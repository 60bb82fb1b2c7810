from __future__ import annotations

import math

import pytest
import torch
from kernel_paths import DEVICE, needs_native, use_path, with_gaps
from torch import Tensor

from legato.kernels import logprobs_triton
from legato.kernels.logprobs import logprobs

PATHS = [
    pytest.param("native", marks=needs_native),
    "portable",
    pytest.param("triton", marks=pytest.mark.gpu),
]
paths = pytest.mark.parametrize("path", PATHS)


def run(
    path: str, logits: Tensor, tokens: Tensor, count: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor, Tensor]:
    if path == "triton" and DEVICE == "cuda":
        own, values, ids = logprobs(logits.to(DEVICE), tokens.to(DEVICE), count)
        return own.cpu(), values.cpu(), ids.cpu()
    use_path(path, monkeypatch)
    return logprobs(logits, tokens, count)


@paths
@pytest.mark.parametrize("width", [1, 2, 96, 577, 1025, 49152])
@pytest.mark.parametrize("scale", [0.0, 5.0])
def test_logprobs(path: str, width: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(width)) * scale - 40
    tokens = torch.tensor([0, width // 2, width - 1])
    own, values, ids = run(path, with_gaps(logits), tokens, 7, monkeypatch)
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(
        own.double(), exact.gather(1, tokens[:, None])[:, 0], rtol=0, atol=2e-5
    )
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :7]
    assert torch.equal(ids, order)
    torch.testing.assert_close(values.double(), exact.gather(1, order), rtol=0, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 577, 5000])
def test_tritons_sums(width: int) -> None:
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(width)) * 5
    sums = logprobs_triton.log_sums(with_gaps(logits).to(DEVICE)).cpu().double()
    best = logits.double().amax(-1)
    assert torch.equal(sums[:, 0], best)
    expected = logits.double().logsumexp(-1) - best
    torch.testing.assert_close(sums[:, 1], expected, rtol=1e-5, atol=1e-5)


@paths
def test_ties_and_minus_infinity(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((1, 320), -math.inf)
    logits[0, [300, 5, 40]] = torch.tensor([0.0, -0.0, 0.0])  # equal
    own, values, ids = run(path, logits, torch.tensor([7]), 5, monkeypatch)
    assert own.tolist() == [-math.inf]
    assert ids.tolist() == [[5, 40, 300, 0, 1]]
    assert values[0, :3].tolist() == pytest.approx([-math.log(3)] * 3, abs=1e-6)
    assert values[0, 3:].tolist() == [-math.inf] * 2


@paths
def test_none_and_more_than_there_are(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    own, values, ids = run(path, logits, torch.tensor([1]), 0, monkeypatch)
    assert own.tolist() == pytest.approx([-1.407606])
    assert values.shape == ids.shape == (1, 0)
    assert run(path, logits, torch.tensor([1]), 9, monkeypatch)[2].tolist() == [[2, 1, 0]]


@paths
def test_a_row_has_the_same_bits_in_any_company(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(6, 1025, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(6)
    together = run(path, logits, tokens, 4, monkeypatch)
    for r in (0, 3, 5):
        alone = run(path, logits[r : r + 1], tokens[r : r + 1], 4, monkeypatch)
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a[0], b[r])
