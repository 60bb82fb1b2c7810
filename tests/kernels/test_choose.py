from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_paths import DEVICE, needs_native, with_gaps
from sampling_oracle import Settings, chosen, tensors, weight
from torch import Tensor

from legato.kernels import choose as choose_module
from legato.kernels import choose_triton, native
from legato.kernels.choose import Choices, argmax, choose
from legato.kernels.draw_weights import draw_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

INTERPRETED = DEVICE == "cpu"  # Triton's kernels; a row that is bisected takes 50 ms
PATHS = [
    pytest.param("native", marks=needs_native),
    "portable",
    pytest.param("triton", marks=pytest.mark.gpu),
]
paths = pytest.mark.parametrize("path", PATHS)
INF = math.inf
# The interpreter's, where a quotient overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


def run_choose(path: str, logits: Tensor, rows: Sequence[Settings]) -> list[int]:
    choices = Choices(*tensors(rows))
    if path == "portable":
        return choose_module._choose(logits, choices).tolist()
    if path == "native":
        return choose(logits, choices).tolist()
    choices = Choices(choices.reals.to(DEVICE), choices.integers.to(DEVICE))
    out = torch.empty(len(rows), dtype=torch.int64, device=DEVICE)
    return choose_triton.choose(logits.to(DEVICE), choices, out).tolist()


def run_argmax(path: str, logits: Tensor) -> list[int]:
    if path == "portable":
        return choose_module._argmax(logits).tolist()
    if path == "native":
        return argmax(logits).tolist()
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=DEVICE)
    return choose_triton.argmax(logits.to(DEVICE), out).tolist()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_as_defined(path: str, logits: Tensor, rows: Sequence[Settings]) -> None:
    expected = [chosen(logits[r], row) for r, row in enumerate(rows)]
    assert run_choose(path, logits, rows) == expected


# Every limit alone and together, and those that are off or keep one token.
LIMITS: list[tuple[float, int, float, float]] = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1e-5, 0, 0.5, 0.0),
    (1.0, 0, 1e-12, 0.0),
    (2.0, 1, 1.0, 0.0),
    (1.0, 40, 1.0, 0.0),
    (1.0, 2**31 - 1, 0.999999, 0.0),
    (1.3, 7, 0.8, 0.05),
    (1.0, 0, 1.0, 0.2),
    (1.0, 0, 0.95, 1.0),
    (100.0, 0, 0.3, 0.0),
]


FEW_LIMITS = [LIMITS[i] for i in (0, 1, 2, 8)]


def rows_of(seed: int, path: str = "native") -> list[Settings]:
    limits = FEW_LIMITS if path == "triton" and INTERPRETED else LIMITS
    return [(*limit, 2**64 - 1 - seed * 977, 3 * r) for r, limit in enumerate(limits)]


def widths(path: str) -> list[int]:
    return [1, 577, 4097] if path == "triton" and INTERPRETED else [1, 2, 96, 577, 1025, 4097]


@paths
@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0])
def test_choose_is_as_defined(path: str, scale: float) -> None:
    for width in widths(path):
        rows = rows_of(width, path)
        assert_as_defined(path, normal(len(rows), width, seed=width) * scale, rows)


@paths
def test_a_whole_vocabulary(path: str) -> None:
    limits = [LIMITS[i] for i in ((2,) if path == "triton" and INTERPRETED else (1, 2, 6, 8))]
    rows: list[Settings] = [(*limit, 7, r) for r, limit in enumerate(limits)]
    assert_as_defined(path, normal(len(rows), 49152) * 0.01, rows)


@paths
def test_many_ties(path: str) -> None:
    rows = rows_of(1, path)
    logits = (normal(len(rows), 1500) * 2).round()
    logits[:, ::3] = -0.0  # equals 0.0
    assert_as_defined(path, logits, rows)
    assert_as_defined(path, logits.mul(0.0), rows)


@paths
def test_minus_infinity_has_no_weight(path: str) -> None:
    rows = rows_of(3, path)
    logits = torch.full((len(rows), 100), -INF)
    logits[:, [3, 50, 99]] = torch.tensor([0.0, -2.0, -1.0])
    assert_as_defined(path, logits, rows)
    assert set(run_choose(path, logits, rows)) <= {3, 50, 99}


@paths
def test_the_largest_floats(path: str) -> None:
    rows = rows_of(4, path)
    logits = (normal(len(rows), 70) * 3e38).clamp(-3.4e38, 3.4e38)
    assert_as_defined(path, logits, rows)


logit = st.one_of(
    st.integers(-8, 8).map(lambda n: n / 4),
    st.floats(-60, 60, width=32),
    st.sampled_from([-INF, -0.0, 3.4e38, -3.4e38, 1e-45]),
)
one_row = st.tuples(
    st.lists(logit, min_size=1, max_size=40),
    st.sampled_from([0.0, 1e-5, 0.3, 1.0, 1.7, 50.0]),
    st.integers(0, 45),
    st.one_of(st.just(1.0), st.floats(1e-9, 1.0)),
    st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31),
)


@paths
def test_any_row_is_as_defined(path: str) -> None:
    few = path == "triton" and INTERPRETED

    @settings(max_examples=10 if few else 200, deadline=None, derandomize=True)
    @given(one_row)
    def check(row: tuple[list[float], float, int, float, float, int, int]) -> None:
        logits, temperature, top_k, top_p, min_p, seed, index = row
        assert_as_defined(
            path, torch.tensor([logits]), [(temperature, top_k, top_p, min_p, seed, index)]
        )

    check()


@paths
def test_argmax(path: str) -> None:
    for width in (1, 15, 16, 17, 577, 4097):
        logits = normal(3, width, seed=width)
        logits[2] = -logits[2].abs() - 1  # nothing that lies past the end may win
        assert run_argmax(path, logits) == logits.argmax(-1).tolist()
    ties = torch.zeros(1, 1025)
    ties[0, [1024, 900, 33]] = 1.0
    assert run_argmax(path, ties) == [33]
    assert run_argmax(path, -ties.abs()) == [0]
    assert run_argmax(path, with_gaps(normal(5, 19))) == normal(5, 19).argmax(-1).tolist()


@paths
@pytest.mark.parametrize("value", [math.nan, INF])
def test_broken_rows(path: str, value: float) -> None:
    logits = normal(6, 577)
    for row, place in ((1, 0), (2, 300), (3, 576)):
        logits[row, place] = value
    logits[5] = -INF
    rows: list[Settings] = [(1.0, 0, 1.0, 0.1, 1, 0)] * 6
    for tokens in (run_argmax(path, logits), run_choose(path, logits, rows)):
        assert [token if token < 0 else 0 for token in tokens] == [0, -1, -1, -1, 0, -1]


@paths
def test_a_row_gets_the_same_token_in_any_company(path: str) -> None:
    rows = rows_of(5, path)
    logits = with_gaps(normal(len(rows), 577) * 2)
    together = run_choose(path, logits, rows)
    for r in range(len(rows)):
        assert run_choose(path, logits[r : r + 1], rows[r : r + 1]) == together[r : r + 1]


@needs_native
def test_the_number_of_threads_plays_no_part() -> None:
    logits, rows = normal(len(LIMITS), 1025), rows_of(6)
    together = run_choose("native", logits, rows)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3, 8):
            torch.set_num_threads(count)
            assert run_choose("native", logits, rows) == together
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(params=[name for name, _ in native._LEVELS])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One after the other, every library that this CPU can run."""
    if request.param not in native.levels():
        pytest.skip("not built, or not for this CPU")
    monkeypatch.setenv("LEGATO_CPU_LEVEL", request.param)
    _forget_library()
    yield request.param
    monkeypatch.undo()
    _forget_library()


def _forget_library() -> None:
    for cached in (native._library, native._function):
        cached.cache_clear()


def test_every_instruction_level_chooses_alike(level: str) -> None:
    assert native.level() == level
    for width in (19, 1025):
        logits = normal(len(LIMITS), width) * 3
        assert_as_defined("native", logits, rows_of(width))


# --- weights -----------------------------------------------------------------------------------


def test_weights_are_exponentials() -> None:
    x = -torch.linspace(0, 25, 20_001)[None]
    weights = draw_weights(x, torch.zeros(1), torch.tensor([0.9]))[0]
    assert weights[0] == 2**40
    exact = (x[0].double() / torch.tensor(0.9).double()).exp()
    # Half a unit of fp32 in the quotient, one in the product, and the last place of the weight.
    error = (weights.double() / 2**40 - exact).abs()
    assert bool((error <= exact * 4e-6 + 2**-40).all())
    assert bool((weights.diff() <= 0).all())
    assert weights.tolist()[::500] == [weight(0.0, v, 0.9) for v in x[0, ::500].tolist()]


def test_weights_end_at_nothing() -> None:
    x = torch.tensor([[0.0, -27.0, -28.0, -200.0, -3e38, -INF]])
    for temperature in (1.0, 1e-5):
        weights = draw_weights(x, torch.zeros(1), torch.tensor([temperature]))[0].tolist()
        assert weights[0] == 2**40
        assert weights[2:] == [0, 0, 0, 0]
        assert (weights[1] > 0) == (temperature == 1.0)


def test_frequencies_over_a_wide_row_are_the_distribution() -> None:
    logits = normal(1, 1200) * 2
    draws = 10_000
    choices = Choices(*tensors([(1.0, 0, 1.0, 0.0, 5, index) for index in range(draws)]))
    tokens = choose(logits.expand(draws, -1), choices)
    probabilities = logits[0].double().softmax(-1)
    # 40 groups of tokens by id, so that each is expected often.
    expected = probabilities.reshape(40, 30).sum(-1) * draws
    counts = torch.bincount(tokens // 30, minlength=40).double()
    assert float(((counts - expected).square() / expected).sum()) < 72.1  # 39 degrees, p = 0.001


def test_shapes_must_fit() -> None:
    choices = Choices(*tensors([(1.0, 0, 1.0, 0.0, 5, 0)]))
    with pytest.raises(ValueError, match=r"reals must have shape \(2, 3\), got \(1, 3\)"):
        choose(torch.zeros(2, 8), choices)
    with pytest.raises(ValueError, match="vocab_size must be at most 4194304, got 4194305"):
        choose(torch.zeros(1, 4194305), choices)
    with pytest.raises(ValueError, match="a row of logits must be contiguous"):
        choose(torch.zeros(1, 16)[:, ::2], choices)
    nothing = Choices(torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, 3, dtype=torch.int64))
    assert choose(torch.zeros(0, 8), nothing).tolist() == []
    assert argmax(torch.zeros(0, 8)).tolist() == []
