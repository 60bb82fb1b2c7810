"""LandingRecord against one flag a row and head."""

from __future__ import annotations

from collections import deque

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.worker.handoff.landing import LandingRecord, Write
from legato.worker.kv.row_range import RowRange

LAYERS, HEADS, REUSED, TOKENS = 3, 4, 2, 12


@st.composite
def ranges(draw: st.DrawFn) -> RowRange:
    layer = draw(st.integers(0, LAYERS - 1))
    token = draw(st.integers(REUSED, TOKENS - 1))
    head = draw(st.integers(0, HEADS - 1))
    return RowRange(
        layer,
        draw(st.integers(1, LAYERS - layer)),
        token,
        draw(st.integers(1, TOKENS - token)),
        head,
        draw(st.integers(1, HEADS - head)),
    )


@given(st.lists(st.tuples(ranges(), st.booleans(), st.integers(0, 2)), max_size=30))
@settings(max_examples=300, deadline=None)
def test_it_knows_what_is_there(writes: list[tuple[RowRange, bool, int]]) -> None:
    """Up to three are under way at a time, and end in the order in which they began."""
    record = LandingRecord(LAYERS, HEADS, REUSED, TOKENS)
    flags = torch.zeros(LAYERS, TOKENS, HEADS, dtype=torch.bool)  # of what has ended
    flags[:, :REUSED] = True
    under_way: deque[tuple[Write, bool]] = deque()

    def check() -> None:
        there = flags.clone()
        for write, _ in under_way:
            part(there, write.rows).fill_(False)
        whole = there.all(2)
        landed = [
            next((t for t in range(TOKENS) if not layer[t]), TOKENS) for layer in whole.tolist()
        ]
        assert record.landed_tokens() == landed
        missing = [(layer, t) for layer, t in enumerate(landed) if t < TOKENS]
        assert record.first_missing() == (missing[0] if missing else None)

    for rows, lands, num_kept in [*writes, (RowRange(0, 1, REUSED, 1, 0, 1), True, 0)]:
        under_way.append((record.begin(rows), lands))
        check()
        while len(under_way) > num_kept:
            write, has_landed = under_way.popleft()
            record.end(write, has_landed=has_landed)
            part(flags, write.rows).fill_(has_landed)
            check()


def part(flags: torch.Tensor, rows: RowRange) -> torch.Tensor:
    """A view."""
    return flags[
        rows.layer_start : rows.layer_end,
        rows.token_start : rows.token_end,
        rows.head_start : rows.head_end,
    ]


def test_a_write_that_is_told_of_late_hides_no_damage() -> None:
    record, rows = LandingRecord(1, 1, 0, 4), RowRange(0, 1, 0, 4, 0, 1)
    first, second = record.begin(rows), record.begin(rows)
    record.end(second, has_landed=False)
    record.end(first, has_landed=True)
    assert record.first_missing() == (0, 0)


def test_a_prompt_that_was_all_there_has_nothing_to_land() -> None:
    record = LandingRecord(LAYERS, HEADS, 8, 8)
    assert (record.landed_tokens(), record.first_missing(), record.num_rows) == ([8] * 3, None, 0)


def test_a_long_prompt_in_order_takes_no_room() -> None:
    record = LandingRecord(80, 8, 0, 100_000)
    for start in range(0, 100_000, 100):
        record.end(record.begin(RowRange(0, 80, start, 100, 0, 8)), has_landed=True)
    assert record.first_missing() is None
    assert [len(spans._edges) for spans in record._groups[0]] == [2] * 80
    assert len(record._groups) == 1
