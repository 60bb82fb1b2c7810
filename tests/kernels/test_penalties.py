from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_paths import DEVICE, needs_native, use_path, with_gaps

from legato.kernels import penalties_triton
from legato.kernels.penalties import LogitChanges, RowChanges, change_logits, row_changes

if TYPE_CHECKING:
    from torch import Tensor

PATHS = [
    pytest.param("native", marks=needs_native),
    "portable",
    pytest.param("triton", marks=pytest.mark.gpu),
]
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


def change(path: str, logits: Tensor, changes: dict[int, RowChanges]) -> Tensor:
    """A changed copy, on the CPU; `logits` keeps its strides."""
    changed = torch.empty_strided(logits.shape, logits.stride()).copy_(logits)
    if path == "triton" and DEVICE == "cpu":  # interpreted
        penalties_triton.change_logits(changed, LogitChanges.of(changes, changed))
        return changed
    changed = changed.to(DEVICE if path == "triton" else "cpu")
    change_logits(changed, changes)
    return changed.cpu()


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


@pytest.mark.parametrize("path", PATHS)
def test_changes_are_those_of_each_token_in_turn(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(requests, st.booleans()), min_size=1, max_size=4), st.integers(0, 99))
    def check(batch: list[tuple[dict[str, Any], bool]], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(batch), VOCAB_SIZE, generator=generator) * 3
        logits[:, 2] = -math.inf
        expected = [
            oracle(logits[r], q) if on else logits[r].tolist() for r, (q, on) in enumerate(batch)
        ]
        changes = {r: row_changes(**request) for r, (request, on) in enumerate(batch) if on}
        if changes:
            logits = change(path, logits, changes)
        assert logits.tolist() == expected

    check()


def many_changes(
    vocab_size: int, num_ids: int, num_bans: int, generator: np.random.Generator
) -> RowChanges:
    """Of random tokens and settings; an id that is banned twice."""
    ids = np.sort(generator.choice(vocab_size, num_ids, replace=False))
    amounts = generator.standard_normal((num_ids, 3)).astype(np.float32)
    amounts[:, 1] = 0.5 + generator.random(num_ids)
    banned_ids = generator.choice(vocab_size, num_bans, replace=False)
    return RowChanges(ids, amounts, np.concatenate((banned_ids, banned_ids[:1])))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("vocab_size", "num_ids", "num_bans"),
    [(1, 1, 1), (7, 0, 7), (577, 500, 0), (4097, 2500, 1500), (4099, 0, 4099), (50257, 1025, 3)],
)
def test_bits_are_those_of_the_portable_path(
    path: str, vocab_size: int, num_ids: int, num_bans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    logits[1, vocab_size // 2] = torch.nan
    logits[2, vocab_size // 2] = torch.inf
    logits[3] = -torch.inf
    logits = with_gaps(logits, 5)
    generator = np.random.default_rng(vocab_size)
    changes = {r: many_changes(vocab_size, num_ids, num_bans, generator) for r in (5, 1, 3, 2)}
    with monkeypatch.context() as portable:
        use_path("portable", portable)
        expected = change("portable", logits, changes)
    use_path(path, monkeypatch)
    changed = change(path, logits, changes)
    same_bits = changed.view(torch.int32) == expected.view(torch.int32)
    assert bool((same_bits | (changed.isnan() & expected.isnan())).all())
    # A row's neighbours have no part in it, and those without changes stay as they are.
    assert torch.equal(changed[[0, 4]], logits[[0, 4]])
    assert torch.equal(change(path, logits[5:], {0: changes[5]})[0], changed[5])


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


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # Triton's interpreter is numpy's
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("repetition", [1e-45, 1e-38, 3e38])
def test_extreme_penalties_leave_finite_logits_finite(
    path: str, repetition: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    logits = torch.tensor([[9.0, 4.0, -3.0, -8.0, 0.0, -math.inf, math.inf]])
    changes = row_changes(
        bias={},
        seen_ids=range(7),
        repetition=repetition,
        output_ids=(),
        presence=0.0,
        frequency=0.0,
        banned_ids=(),
    )
    row = change(path, logits, {0: changes})[0].tolist()
    assert all(math.isfinite(x) for x in row[:5])
    assert row[0] >= row[1] >= row[4] >= row[2] >= row[3]
    assert row[5:] == [-math.inf, math.inf]


def test_what_does_not_fit_is_refused() -> None:
    logits, one = torch.zeros(2, 8), np.array([[0.0, 1.0, 0.0]], np.float32)
    none, row = np.zeros(0, np.int64), np.array([3])
    good = RowChanges(row, one, row)
    for message, row_number, changes in (
        (r"a row must be in \[0, 2\), got 2 to 2", 2, good),
        (r"a row must be in \[0, 2\), got -1 to -1", -1, good),
        (r"an id must be in \[0, 8\), got 8 to 8", 0, RowChanges(row + 5, one, none)),
        (r"an id must be in \[0, 8\), got -1 to -1", 0, RowChanges(row - 4, one, none)),
        (r"a banned id must be in \[0, 8\), got 8 to 8", 0, RowChanges(row, one, row + 5)),
        (r"amounts must have shape \(1, 3\), got \(2, 3\)", 0,
         RowChanges(row, one.repeat(2, 0), none)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            change_logits(logits, {row_number: changes})
    with pytest.raises(ValueError, match=r"logits must be torch\.float32, got torch\.float64"):
        change_logits(logits.double(), {0: good})
    with pytest.raises(ValueError, match="a row of logits must be contiguous"):
        change_logits(torch.zeros(8, 2).T, {0: good})
    assert not logits.any()
    change_logits(logits, {})
    assert not logits.any()
