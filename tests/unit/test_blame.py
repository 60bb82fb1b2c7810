from __future__ import annotations

import pytest

from legato.cluster.blame import (
    INNOCENT_PER_STRIKE,
    WELL_AFTER_S,
    WELL_AFTER_TOKENS,
    gives_up,
    may_be_cause,
    was_well,
)
from legato.cluster.timings import Phase


def test_only_what_is_computed_can_be_the_cause() -> None:
    blamed = {
        (role, phase, under_way)
        for role in ("prefill", "decode")
        for phase in (Phase.TICKET, Phase.PREFILL, Phase.HANDOFF, Phase.DECODE)
        for under_way in (True, False)
        if may_be_cause(role, phase, kv_under_way=under_way)
    }
    assert blamed == {
        ("prefill", Phase.PREFILL, True),
        ("prefill", Phase.PREFILL, False),
        ("decode", Phase.PREFILL, False),  # of its own: a short rest of the prompt
        ("decode", Phase.HANDOFF, False),
        ("decode", Phase.DECODE, False),
    }


@pytest.mark.parametrize(
    ("phase", "seconds", "tokens", "well"),
    [
        (Phase.DECODE, WELL_AFTER_S, 0, True),
        (Phase.DECODE, 0.0, WELL_AFTER_TOKENS, True),
        (Phase.DECODE, 0.9 * WELL_AFTER_S, WELL_AFTER_TOKENS - 1, False),
        (Phase.PREFILL, 100.0, 0, False),
        (Phase.HANDOFF, 100.0, 1, False),
    ],
)
def test_who_has_decoded_for_a_while_was_well(
    phase: Phase, seconds: float, tokens: int, well: bool
) -> None:
    assert was_well(phase, seconds, tokens) is well


def test_both_kinds_of_losses_have_a_bound() -> None:
    assert not gives_up(3, 3, 4)
    assert gives_up(4, 4, 4)
    assert not gives_up(0, 4 * INNOCENT_PER_STRIKE - 1, 4)
    assert gives_up(0, 4 * INNOCENT_PER_STRIKE, 4)
