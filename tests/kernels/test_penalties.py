from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_paths import DEVICE

from legato.kernels.penalties import change_logits, row_changes

if TYPE_CHECKING:
    from torch import Tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if DEVICE == "cuda" else ["cpu"]
VOCAB_SIZE = 12
token = st.integers(0, VOCAB_SIZE - 1)
requests = st.fixed_dictionaries(
    {
        "bias": st.dictionaries(token, st.floats(-9, 9, width=32), max_size=4),
        "seen_ids": st.lists(token, max_size=8),
        "repetition": st.sampled_from([0.5, 1.0, 1.3]),
        "output_ids": st.lists(token, max_size=8),
        "presence": st.sampled_from([0.0, -1.5, 0.7]),
        "frequency": st.sampled_from([0.0, 0.1, -0.3]),
        "banned_ids": st.frozensets(token, max_size=VOCAB_SIZE),
    }
)


def oracle(logits: Tensor, request: dict[str, Any]) -> list[float]:
    """One token after the other, in fp32."""
    row = [np.float32(x) for x in logits.tolist()]
    for i, bias in request["bias"].items():
        row[i] += np.float32(bias)
    penalty = np.float32(request["repetition"])
    for i in set(request["seen_ids"]):
        row[i] = row[i] / penalty if row[i] > 0 else row[i] * penalty
    for i, count in Counter(request["output_ids"]).items():
        row[i] -= np.float32(request["presence"] + request["frequency"] * count)
    allowed = [-math.inf if i in request["banned_ids"] else float(x) for i, x in enumerate(row)]
    return allowed if max(allowed) > -math.inf else [float(x) for x in row]


@pytest.mark.parametrize("device", DEVICES)
def test_changes_are_those_of_each_token_in_turn(device: str) -> None:
    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(requests, st.booleans()), min_size=1, max_size=4), st.integers(0, 99))
    def check(batch: list[tuple[dict[str, Any], bool]], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(batch), VOCAB_SIZE, generator=generator) * 3
        logits[:, 2] = -math.inf
        expected = [
            oracle(logits[r], q) if on else logits[r].tolist() for r, (q, on) in enumerate(batch)
        ]
        changed = logits.to(device)
        changes = {r: row_changes(**request) for r, (request, on) in enumerate(batch) if on}
        if changes:
            change_logits(changed, changes)
        assert changed.tolist() == expected

    check()


def test_a_repetition_penalty_over_a_long_prompt() -> None:
    prompt = [i % 500 for i in range(8000)]
    logits = torch.randn(1, 1000)
    expected = torch.where(logits > 0, logits / 2, logits * 2)
    expected[:, 500:] = logits[:, 500:]
    changes = row_changes(
        bias={},
        seen_ids=prompt,
        repetition=2.0,
        output_ids=(),
        presence=0.0,
        frequency=0.0,
        banned_ids=(),
    )
    change_logits(logits, {0: changes})
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("repetition", [1e-45, 1e-38, 3e38])
def test_extreme_penalties_leave_finite_logits_finite(device: str, repetition: float) -> None:
    logits = torch.tensor([[9.0, 4.0, -3.0, -8.0, 0.0, -math.inf, math.inf]], device=device)
    changes = row_changes(
        bias={},
        seen_ids=range(7),
        repetition=repetition,
        output_ids=(),
        presence=0.0,
        frequency=0.0,
        banned_ids=(),
    )
    change_logits(logits, {0: changes})
    row = logits[0].tolist()
    assert all(math.isfinite(x) for x in row[:5])
    assert row[0] >= row[1] >= row[4] >= row[2] >= row[3]
    assert row[5:] == [-math.inf, math.inf]
