from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from legato.kernels.counter_rng import uniform
from legato.worker import sampler
from legato.worker.logits import Logits
from legato.worker.sampler import Sampled, SamplingRow, launch_sample
from legato.worker.sampling_params import SamplingParams

VOCAB_SIZE = 320


def make_row(
    *,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    banned: frozenset[int] = frozenset(),
    **overrides: Any,  # noqa: ANN401  # passed on to SamplingParams
) -> SamplingRow:
    settings: dict[str, Any] = {
        "max_tokens": 16,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 42,
        "ignore_eos": False,
        "min_tokens": 0,
        "logprobs": None,
        "stop_token_ids": frozenset(),
        "logit_bias": {},
    }
    settings.update(overrides)
    return SamplingRow(SamplingParams(**settings), prompt, output, banned)


def at_index(index: int, **overrides: Any) -> SamplingRow:  # noqa: ANN401  # see make_row
    """A row whose next token has this output index; no penalties read the output."""
    return make_row(output=(0,) * index, **overrides)


def sample(values: Tensor, rows: list[SamplingRow]) -> list[Sampled]:
    sampled = [s for s in sampler.sample(Logits(values), rows) if s is not None]
    assert len(sampled) == len(rows), "a row is broken"
    return sampled


def one(logits: Tensor, row: SamplingRow) -> Sampled:
    return sample(logits[None], [row])[0]


def random_logits(rows: int = 1, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * 2


def draw(logits: Tensor, count: int, **overrides: Any) -> list[int]:  # noqa: ANN401  # see make_row
    """The tokens at `count` output indices."""
    rows = [at_index(index, **overrides) for index in range(count)]
    return [s.token_id for s in sample(logits.expand(count, -1), rows)]


def chi_square(tokens: list[int], probabilities: Tensor) -> float:
    counts = Counter(tokens)
    return sum(
        (counts[token] - len(tokens) * p) ** 2 / (len(tokens) * p)
        for token, p in enumerate(probabilities.tolist())
        if p > 0
    )


# --- the generator -----------------------------------------------------------------------------


def test_uniform_is_a_fixed_function() -> None:
    # Values that every release must reproduce: an answer may move between machines.
    assert uniform(0, 0) == 0.6524484863740323
    assert uniform(42, 7) == 0.734720458462364
    assert uniform(2**63 - 1, 2**31) == 0.6895452185994595


def test_uniform_is_splitmix64_stepped() -> None:
    class SplitMix64:
        def __init__(self, state: int) -> None:
            self.state = state

        def next(self) -> int:
            self.state = (self.state + 0x9E3779B97F4A7C15) % 2**64
            z = self.state
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
            return z ^ (z >> 31)

    assert SplitMix64(0).next() == 0xE220A8397B1DCDAF  # the published first output of state 0
    for seed in (0, 42, 2**63 - 1):
        stream = SplitMix64(SplitMix64(seed).next())
        for index in range(5):
            assert uniform(seed, index) == ((stream.next() >> 11) + 1) / 2**53


def test_uniform_covers_its_range_evenly_along_both_counters() -> None:
    for numbers in (
        [uniform(7, index) for index in range(20_000)],
        [uniform(seed, 0) for seed in range(20_000)],
    ):
        assert all(0 < number <= 1 for number in numbers)
        bins = [math.ceil(number * 20) - 1 for number in numbers]
        assert chi_square(bins, torch.full((20,), 0.05)) < 43.8  # 19 degrees, p = 0.001
        pairs = [20 * a + b for a, b in zip(bins[::2], bins[1::2], strict=True)]
        assert chi_square(pairs, torch.full((400,), 1 / 400)) < 490  # 399 degrees, p = 0.001


# --- greedy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-40, 9.9e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits()[0]
    assert one(logits, make_row(temperature=temperature)).token_id == int(logits.argmax())


def test_the_smallest_sampled_temperature_overflows_nothing() -> None:
    logits = random_logits()[0] * 1e4
    result = one(logits, make_row(temperature=1e-5, logprobs=1))
    assert result.token_id == int(logits.argmax())


def test_equal_logits_go_to_the_lower_id() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[[7, 300]] = 5.0
    assert one(logits, make_row(temperature=0.0)).token_id == 7


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(2)
    before = logits.clone()
    row = make_row(
        output=(5,),
        banned=frozenset({9}),
        repetition_penalty=2.0,
        presence_penalty=1.0,
        logit_bias={3: 5.0},
        logprobs=2,
    )
    sample(logits, [row, make_row(top_p=0.5)])
    assert torch.equal(logits, before)


# --- changes to the logits ---------------------------------------------------------------------


def chosen(logits: list[float], **overrides: Any) -> int:  # noqa: ANN401  # see make_row
    settings = {"temperature": 0.0, "prompt": (), **overrides}
    return one(torch.tensor(logits), make_row(**settings)).token_id


def test_repetition_penalty_counts_prompt_and_output_once_and_by_sign() -> None:
    assert chosen([3.0, 2.0, -9.0], prompt=(0,), repetition_penalty=1.4) == 0  # 2.14
    assert chosen([3.0, 2.0, -9.0], prompt=(0, 0, 0), repetition_penalty=1.4) == 0  # once
    assert chosen([3.0, 2.0, -9.0], prompt=(0,), repetition_penalty=1.6) == 1  # 1.875
    assert chosen([3.0, 2.0, -9.0], output=(0,), repetition_penalty=1.6) == 1
    # Negative logits are multiplied: dividing -1 by 2 would raise it.
    assert chosen([-1.0, -1.5], prompt=(0,), repetition_penalty=2.0) == 1
    # Below 1 it rewards.
    assert chosen([2.0, 3.0], prompt=(0,), repetition_penalty=0.5) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1e-45, 1e-38, 3e38])
def test_no_repetition_penalty_makes_a_row_look_broken(penalty: float, temperature: float) -> None:
    row = make_row(
        prompt=tuple(range(VOCAB_SIZE)), repetition_penalty=penalty, temperature=temperature
    )
    for logits in (random_logits()[0], -random_logits()[0].abs()):
        assert 0 <= one(logits, row).token_id < VOCAB_SIZE


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    assert chosen([3.0, 2.0], prompt=(0, 0), presence_penalty=2.0) == 0
    assert chosen([3.0, 2.0], output=(0,), presence_penalty=1.1) == 1
    assert chosen([3.0, 2.0], output=(0, 0, 0), presence_penalty=0.9) == 0  # once
    assert chosen([3.0, 2.0], output=(0, 0), frequency_penalty=0.4) == 0
    assert chosen([3.0, 2.0], output=(0, 0, 0), frequency_penalty=0.4) == 1  # each time
    assert chosen([2.0, 3.0], output=(0,), presence_penalty=-1.1) == 0


def test_logit_bias_is_added() -> None:
    assert chosen([3.0, 2.0, 1.0], logit_bias={2: 2.5}) == 2
    assert chosen([3.0, 2.0, 1.0], logit_bias={0: -100.0}) == 1
    # Before the repetition penalty, which sees the sign of the biased logit.
    assert chosen([-1.0, 2.0], logit_bias={0: 6.0}, prompt=(0,), repetition_penalty=2.0) == 0  # 2.5


def test_banned_tokens_are_never_chosen() -> None:
    assert chosen([3.0, 2.0, 1.0], banned=frozenset({0})) == 1
    logits = torch.tensor([9.0, 1.0, 1.0, 1.0])
    assert set(draw(logits, 200, banned=frozenset({0, 2}))) == {1, 3}
    assert chosen([3.0, 2.0], banned=frozenset({0}), logit_bias={0: 100.0}) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_that_leave_nothing_are_lifted(temperature: float) -> None:
    result = one(
        torch.tensor([1.0, 50.0, -torch.inf]),
        make_row(temperature=temperature, banned=frozenset({0, 1}), logprobs=3),
    )
    assert result.token_id == 1
    assert result.top[0] == (1, 0.0)


# --- draws -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_p": 0.75}, [1, 3, 4]),  # 0.4, 0.3, then 0.15 crosses
        ({"min_p": 0.3}, [1, 3, 4]),  # 0.12 and more
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.5}, [1, 3]),
        ({"top_k": 2, "top_p": 0.6}, [1, 3]),  # top-p of what top-k left: 4/7 is below 0.6
    ],
    ids=str,
)
def test_frequencies_are_the_distribution(overrides: dict[str, Any], kept: list[int]) -> None:
    probabilities = torch.tensor([0.1, 0.3, 0.05, 0.4, 0.15], dtype=torch.float64)
    logits = probabilities.log().float() + 3
    expected = probabilities ** (1 / overrides.get("temperature", 1.0))
    expected[[token for token in range(5) if token not in kept]] = 0
    expected /= expected.sum()
    tokens = draw(logits, 4000, **overrides)
    assert set(tokens) == set(kept)
    assert chi_square(tokens, expected) < 18.5  # 4 degrees, p = 0.001; fewer are stricter


@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_top_p_of_nearly_flat_logits_keeps_the_best(top_p: float) -> None:
    logits = random_logits(vocab_size=10_000)[0] * 0.01
    tokens = draw(logits, 400, top_p=top_p)
    probabilities, order = logits.softmax(-1).sort(descending=True)
    inside = int((probabilities.cumsum(0) - probabilities < top_p).sum())
    assert inside > 4000
    assert set(tokens) <= set(order[:inside].tolist())
    assert len(set(tokens) - set(order[:1024].tolist())) > 100


def test_a_tiny_top_p_keeps_the_best_token() -> None:
    logits = random_logits()[0]
    assert set(draw(logits, 20, top_p=1e-9)) == {int(logits.argmax())}


@pytest.mark.parametrize("top_k", [0, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1])
def test_top_k_of_the_vocabulary_or_more_is_off(top_k: int) -> None:
    logits = random_logits()[0]
    assert draw(logits, 50, top_k=top_k) == draw(logits, 50)


def test_top_k_with_ties_at_its_edge_keeps_the_lower_ids() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    assert set(draw(logits, 100, top_k=3)) == {0, 1, 2}


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((VOCAB_SIZE,), -torch.inf)
    logits[[5, 9]] = 1.0
    for overrides in ({}, {"top_k": 4}, {"top_p": 0.99}, {"min_p": 0.1}, {"temperature": 2.0}):
        assert set(draw(logits, 60, **overrides)) == {5, 9}


# --- independence ------------------------------------------------------------------------------


def test_a_row_gives_the_same_token_alone_and_in_any_company() -> None:
    logits = random_logits(8)
    rows = [
        make_row(),
        make_row(temperature=0.0, logprobs=5),
        at_index(3, seed=1, top_p=0.7),
        at_index(9, seed=2**63 - 1, top_k=5, logprobs=2),
        make_row(seed=0, min_p=0.2, banned=frozenset({4, 5})),
        at_index(1, temperature=0.0, repetition_penalty=1.3, logit_bias={7: 1.0}),
        at_index(2, seed=3, frequency_penalty=1.0),
        make_row(seed=42, temperature=1.7),
    ]
    alone = [one(logits[r], row) for r, row in enumerate(rows)]
    assert sample(logits, rows) == alone
    order = [5, 2, 7, 0, 1]
    assert sample(logits[order], [rows[r] for r in order]) == [alone[r] for r in order]


def test_torchs_own_generator_plays_no_part() -> None:
    logits = random_logits()[0]
    torch.manual_seed(1)
    first = draw(logits, 30)
    state = torch.get_rng_state()
    assert draw(logits, 30) == first
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_and_indices_give_different_tokens() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    assert len(set(draw(logits, 200))) > 100
    by_seed = [one(logits, make_row(seed=seed)).token_id for seed in range(200)]
    assert len(set(by_seed)) > 100
    assert draw(logits, 20, seed=0) != draw(logits, 20, seed=1)


# --- logprobs ----------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits()[0]
    expected = logits.double().log_softmax(-1)
    for overrides in ({"temperature": 0.0}, {"temperature": 2.0}, {"logit_bias": {3: 50.0}}):
        result = one(logits, make_row(logprobs=5, **overrides))
        assert result.logprob == pytest.approx(float(expected[result.token_id]), abs=1e-5)
        ids = [token for token, _ in result.top]
        assert ids == expected.topk(5).indices.tolist()
        values = torch.tensor([value for _, value in result.top], dtype=torch.float64)
        assert_close(values, expected[ids], rtol=0, atol=1e-5)


def test_how_many_logprobs() -> None:
    logits = random_logits()[0]
    nothing = one(logits, make_row(logprobs=None))
    assert (nothing.logprob, nothing.top) == (None, ())
    own = one(logits, make_row(logprobs=0))
    assert own.logprob is not None
    assert own.top == ()
    assert len(one(logits[:4], make_row(logprobs=20)).top) == 4


def test_logprob_ties_go_to_the_lower_id_and_minus_infinity_survives() -> None:
    logits = torch.full((VOCAB_SIZE,), -torch.inf)
    logits[[300, 5, 40]] = 0.0
    result = one(logits, make_row(temperature=0.0, logprobs=5))
    assert [token for token, _ in result.top] == [5, 40, 300, 0, 1]
    assert [value for _, value in result.top][3:] == [-math.inf, -math.inf]
    assert result.logprob == pytest.approx(-math.log(3))
    biased = one(
        torch.tensor([0.0, -torch.inf]), make_row(logprobs=2, temperature=0.0, logit_bias={1: 9.0})
    )
    assert biased.token_id == 0


# --- devices -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_chooses_what_the_cpu_chooses() -> None:
    logits = random_logits(6, 49152)
    rows = [
        make_row(temperature=0.0, banned=frozenset({3}), logprobs=4),
        at_index(3, seed=1, top_p=0.7, repetition_penalty=1.2),
        at_index(9, seed=2**63 - 1, top_k=50, logprobs=2),
        make_row(seed=0, min_p=0.02),
        make_row(seed=5, top_p=0.999),
        make_row(seed=6, temperature=1.7, logit_bias={7: 20.0}),
    ]
    expected = sample(logits, rows)
    actual = sample(logits.cuda(), rows)
    assert [s.token_id for s in actual] == [s.token_id for s in expected]
    for a, e in zip(actual, expected, strict=True):
        assert a.logprob == pytest.approx(e.logprob, abs=1e-4)
        assert [token for token, _ in a.top] == [token for token, _ in e.top]


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.7, "top_k": 5, "min_p": 0.01, "logprobs": 3},
        {"temperature": 0.0, "logprobs": 2, "logit_bias": {17: 2.0}},
        {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.5},
    ],
)
def test_a_broken_row_has_no_token_and_leaves_its_neighbours_alone(
    broken: float, settings: dict[str, Any]
) -> None:
    rows = [make_row(seed=i, output=(17, 3), **settings) for i in range(3)]
    logits = random_logits(3)
    expected = sample(logits, rows)
    logits[1, 17] = broken
    assert sampler.sample(Logits(logits), rows) == [expected[0], None, expected[2]]


def test_a_row_without_a_finite_logit_is_broken() -> None:
    assert sampler.sample(Logits(torch.full((1, 4), -torch.inf)), [make_row()]) == [None]


def test_rows_and_logits_must_fit() -> None:
    with pytest.raises(ValueError, match="2 rows for 1 requests"):
        sample(random_logits(2), [make_row()])
    assert sample(torch.empty(0, VOCAB_SIZE), []) == []


def test_the_pass_own_best_tokens_are_taken_and_kept() -> None:
    values, best = random_logits(2), torch.tensor([7, -1])
    taken = launch_sample(Logits(values, best), [make_row(temperature=0.0)] * 2)
    best.fill_(9)  # the next pass writes there
    assert taken.token_ids.tolist() == [7, -1]
    assert taken.collect() == [Sampled(7, None, ()), None]


def test_a_broken_row_is_reported_though_a_ban_hides_it() -> None:
    values, banned = random_logits(2), frozenset({3})
    values[1, 3] = math.nan
    rows = [make_row(temperature=0.0, banned=banned)] * 2
    for best in (None, torch.tensor([5, -1])):
        whole, broken = sampler.sample(Logits(values, best), rows)
        assert whole is not None
        assert broken is None


# --- guides --------------------------------------------------------------------------------------


def masked(row: SamplingRow, *allowed: int) -> SamplingRow:
    bits = np.zeros((VOCAB_SIZE // 32 + 1) * 32, np.bool_)
    bits[list(allowed)] = True
    return replace(row, allowed=np.packbits(bits, bitorder="little").view(np.int32))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_only_allowed_tokens_are_chosen(temperature: float) -> None:
    logits = torch.randn(VOCAB_SIZE)
    seen = {
        one(logits, masked(at_index(i, temperature=temperature), 3, 70, 319)).token_id
        for i in range(60)
    }
    best = max((3, 70, 319), key=lambda i: float(logits[i]))
    assert seen == {best} if temperature == 0.0 else seen <= {3, 70, 319}
    assert temperature < 50.0 or seen == {3, 70, 319}


def test_neighbours_without_a_mask_keep_their_tokens_and_all_their_logprobs() -> None:
    logits = torch.randn(3, VOCAB_SIZE)
    rows = [make_row(logprobs=4), make_row(seed=7, logprobs=2), make_row(temperature=0.0)]
    alone = [one(logits[i], row) for i, row in enumerate(rows)]
    guided = [masked(rows[0], 5, 6), *rows[1:]]
    before = logits.clone()
    together = sample(logits, guided)
    assert torch.equal(logits, before)
    assert together[1:] == alone[1:]
    # Of the raw logits, also of the masked row.
    raw = logits[0].log_softmax(0)
    assert together[0].token_id in (5, 6)
    assert together[0].logprob == pytest.approx(float(raw[together[0].token_id]))
    assert together[0].top == alone[0].top


def test_bias_and_penalties_act_among_what_is_allowed() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[5] = 1.0
    row = make_row(temperature=0.0, logit_bias={9: 100.0, 6: 2.0})
    assert one(logits, row).token_id == 9
    assert one(logits, masked(row, 5, 6)).token_id == 6
    penalised = make_row(temperature=0.0, output=(5,), presence_penalty=2.0)
    assert one(logits, masked(penalised, 5, 8)).token_id == 8


def test_a_ban_that_leaves_a_guide_nothing_is_lifted() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[100] = 9.0
    row = make_row(temperature=0.0, banned=frozenset({7, 8}))
    assert one(logits, masked(row, 7, 9)).token_id == 9
    assert one(logits, masked(row, 7)).token_id == 7
    assert one(logits, masked(row, 8)).token_id == 8


def test_a_mask_hides_no_broken_row() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, 4] = torch.nan
    rows = [masked(make_row(), 5), masked(make_row(), 5)]
    first, second = launch_sample(Logits(logits), rows).collect()
    assert first is None
    assert second is not None
    assert second.token_id == 5
