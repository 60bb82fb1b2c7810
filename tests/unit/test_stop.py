"""StopMatcher: against a naive search of the whole text, however it is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.cluster.text.stop import StopMatcher


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    """The deltas, the last one from flush, and what matched."""
    matcher = StopMatcher(stops)
    deltas = [matcher.push(piece) for piece in pieces]
    if matcher.matched is None:
        deltas.append(matcher.flush())
    return deltas, matcher.matched


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that ends first wins; of those, the longest."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


@pytest.mark.parametrize(
    ("stops", "text", "matched"),
    [
        (["STOP"], "ab", "STOP"),
        (["TOPc"], "abS", "TOPc"),
        (["STOPX"], "abSTOPcd", None),
        (["ST", "STOP"], "ab", "ST"),
        (["STOP", "ST"], "ab", "ST"),
        (["TO", "STO"], "ab", "STO"),  # both end at the same character
        (["OPc", "STOPd"], "abST", "OPc"),
        (["STOPd", "TOPx", "Pc"], "abSTO", "Pc"),
        (["d"], "abSTOPc", "d"),
        (["a"], "", "a"),
        (["abSTOPcd"], "", "abSTOPcd"),
        (["abSTOPcde"], "abSTOPcd", None),
        ([], "abSTOPcd", None),
        (["STOP", "STOP"], "ab", "STOP"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_script(stops: list[str], text: str, matched: str | None, size: int) -> None:
    script = "abSTOPcd"
    pieces = [script[i : i + size] for i in range(0, len(script), size)]
    deltas, found = run(pieces, stops)
    assert ("".join(deltas), found) == (text, matched)


ALPHABET = st.sampled_from("ab")
WORDS = st.text(ALPHABET, min_size=1, max_size=5)


@settings(max_examples=600, deadline=None)
@given(
    pieces=st.lists(st.text(st.sampled_from("abc"), max_size=6), max_size=8),
    stops=st.lists(WORDS, max_size=4),
)
def test_any_cut_of_any_text(pieces: list[str], stops: list[str]) -> None:
    whole, stop = naive("".join(pieces), stops)
    deltas, matched = run(pieces, stops)
    assert "".join(deltas) == whole
    assert matched == stop
    for end in range(len(deltas)):
        assert whole.startswith("".join(deltas[:end]))


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(WORDS, max_size=8), stops=st.lists(WORDS, min_size=1, max_size=3))
def test_only_what_may_become_a_stop_string_is_held(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = delivered = ""
    for piece in pieces:
        seen += piece
        delivered += matcher.push(piece)
        if matcher.matched is not None:
            break
        held = seen[len(delivered) :]
        starts = [seen[i:] for i in range(len(seen)) if any(s.startswith(seen[i:]) for s in stops)]
        assert held == (starts[0] if starts else "")


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(WORDS, max_size=8),
    stops=st.lists(WORDS, min_size=1, max_size=3),
    may_stop_from=st.integers(0, 8),
)
def test_matches_that_come_too_early_are_passed_over(
    pieces: list[str], stops: list[str], may_stop_from: int
) -> None:
    matcher = StopMatcher(stops)
    delivered = ""
    for index, piece in enumerate(pieces):
        delivered += matcher.push(piece, may_stop=index >= may_stop_from)
    if matcher.matched is None:
        delivered += matcher.flush()
    text = "".join(pieces)
    early = len("".join(pieces[:may_stop_from]))
    # The first character after `early` at which a stop string ends that was not delivered before.
    ends = [
        (end, -len(stop), stop)
        for end in range(early + 1, len(text) + 1)
        for stop in stops
        if text[:end].endswith(stop)
    ]
    if ends:
        end, _, stop = min(ends)
        assert matcher.matched is not None
        assert delivered == text[: end - len(matcher.matched)]
        assert matcher.matched == stop
    else:
        assert matcher.matched is None
        assert delivered == text


def test_after_a_match_nothing_comes() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == "a"
    assert matcher.push("xyz") == ""
    assert matcher.flush() == ""
    assert matcher.matched == "b"


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])


def test_the_largest_stop_strings_that_a_request_may_have() -> None:
    stops = ["a" * 1000 + chr(ord("b") + index) for index in range(16)]
    matcher = StopMatcher(stops)
    text = "".join(matcher.push("a" * 100) for _ in range(1000))  # a naive search would crawl
    assert len(text) == 100_000 - 1000
    assert matcher.push("q") == ""
    assert matcher.matched == stops[15]
