from __future__ import annotations

import numpy as np
import pytest
import torch

from legato.kernels.token_mask import mask_tokens


def words_of(bits: np.ndarray, spare: int = 0) -> np.ndarray:
    padded = np.zeros((len(bits) // 32 + 1 + spare) * 32, np.bool_)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view(np.int32)


@pytest.mark.parametrize("width", [1, 31, 32, 33, 320, 1000])
@pytest.mark.parametrize("stride", [0, 7])
def test_only_what_is_allowed_is_left(width: int, stride: int) -> None:
    rng = np.random.default_rng(width)
    whole = torch.randn(5, width + stride)
    logits, before = whole[:, :width], whole.clone()
    bits = {row: rng.random(width) < 0.5 for row in (0, 3)}
    mask_tokens(logits, {row: words_of(b, spare=row) for row, b in bits.items()})
    for row in range(5):
        allowed = torch.from_numpy(bits.get(row, np.ones(width, np.bool_)))
        expected = before[row, :width].where(allowed, -torch.inf)
        assert torch.equal(logits[row], expected)
    assert torch.equal(whole[:, width:], before[:, width:])


def test_the_sign_bit_is_a_token_like_others() -> None:
    for token in (31, 63):
        logits = torch.zeros(1, 64)
        mask_tokens(logits, {0: words_of(np.arange(64) == token)})
        assert logits[0].isfinite().nonzero().tolist() == [[token]]


def test_wrong_arguments() -> None:
    words = words_of(np.ones(64, np.bool_))
    with pytest.raises(ValueError, match=r"a row must be in \[0, 2\), got 2"):
        mask_tokens(torch.zeros(2, 64), {2: words})
    with pytest.raises(ValueError, match="row 1 has 3 words for 100 tokens"):
        mask_tokens(torch.zeros(2, 100), {1: words})
    with pytest.raises(ValueError, match="logits"):
        mask_tokens(torch.zeros(2, 64, dtype=torch.float16), {0: words})
    untouched = torch.ones(2, 64)
    mask_tokens(untouched, {})
    assert torch.equal(untouched, torch.ones(2, 64))
