"""OutputLengths: the quantile of recent lengths, given what was emitted."""

from __future__ import annotations

import math
import random

import pytest

from legato.worker.scheduling.output_lengths import PRIOR_TOKENS, OutputLengths


def test_before_anything_is_known_the_prior_counts_within_max_tokens() -> None:
    lengths = OutputLengths()
    assert lengths.expected(4096, 1, 0.5) == PRIOR_TOKENS
    assert lengths.expected(100, 1, 0.5) == 100
    assert lengths.expected(4096, PRIOR_TOKENS, 0.5) == PRIOR_TOKENS + PRIOR_TOKENS // 2 + 1


def test_it_is_the_quantile_of_the_longer_ones_of_the_window() -> None:
    draw = random.Random(5)
    lengths, recent = OutputLengths(window=50), []
    for _ in range(400):
        recent.append(draw.randint(1, 300))
        lengths.record(recent[-1])
        if len(recent) < 50:
            continue  # the prior is still among them
        for quantile in (0.0, 0.1, 0.5, 0.95, 1.0):
            emitted = draw.randint(0, 320)
            longer = sorted(n for n in recent[-50:] if n > emitted)
            right = (
                longer[max(0, math.ceil(quantile * len(longer)) - 1)]
                if longer
                else emitted + emitted // 2 + 1
            )
            assert lengths.expected(10_000, emitted, quantile) == right
            assert lengths.expected(emitted + 2, emitted, quantile) == min(right, emitted + 2)


def test_each_real_length_takes_the_place_of_an_imaginary_one() -> None:
    lengths = OutputLengths()
    for _ in range(16):
        lengths.record(10)
    assert lengths.expected(4096, 0, 0.4) == 10
    assert lengths.expected(4096, 0, 0.6) == PRIOR_TOKENS  # 16 of 32 are still imaginary
    for _ in range(16):
        lengths.record(10)
    assert lengths.expected(4096, 0, 1.0) == 10


def test_more_than_was_emitted_is_expected_as_long_as_there_may_be_more() -> None:
    lengths = OutputLengths()
    lengths.record(7)
    for emitted in range(0, 600, 13):
        assert emitted + 1 <= lengths.expected(1000, emitted, 0.5) <= 1000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OutputLengths(window=0), "window must be at least 1, got 0"),
        (lambda: OutputLengths(prior_tokens=0), "prior_tokens must be at least 1, got 0"),
        (lambda: OutputLengths().record(0), "num_tokens must be at least 1, got 0"),
    ],
)
def test_wrong_numbers_are_named(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
