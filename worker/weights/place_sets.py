"""place_sets: matching a text in bounded time, by following all ways through a pattern at once.

A set of places in the text goes in at the front of a part of the pattern, and the set of places
where the part can end comes out. Nothing is tried twice, so no pattern is much slower than others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

# For all patterns of one checkpoint: 1 to 5 s. 1000 layers with three patterns take 7 million.
MAX_STEPS = 10_000_000

# Bit i of a set of places stands for the place before character i.
Places: TypeAlias = int
Node: TypeAlias = "Callable[[Text, Places], Places]"
IsIn: TypeAlias = "Callable[[str], bool]"


class TooManyStepsError(ValueError):
    """The budget is spent."""


@dataclass
class Budget:
    """Of the steps that matches may still take together; a step takes less than a microsecond."""

    steps: int = MAX_STEPS

    def spend(self, steps: int) -> None:
        """Raises TooManyStepsError where there are not as many left."""
        self.steps -= steps
        if self.steps < 0:
            raise TooManyStepsError("the patterns are too costly")


class Text:
    """What is matched, and where in it the characters of each kind are."""

    def __init__(self, text: str, budget: Budget) -> None:
        self.text = text
        self.budget = budget
        self._cost = 1 + len(text) // 64  # of a step: the sets have as many bits as the text
        self._places: dict[IsIn, Places] = {}

    def step(self) -> None:
        """Counts one."""
        self.budget.spend(self._cost)

    def places(self, is_in: IsIn) -> Places:
        """Before which places there is such a character."""
        found = self._places.get(is_in)
        if found is None:
            self.budget.spend(1 + len(self.text))
            bits = "".join("1" if is_in(char) else "0" for char in reversed(self.text))
            found = self._places[is_in] = int(bits or "0", 2)
        return found


def one(is_in: IsIn) -> Node:
    """One character of a kind."""

    def node(text: Text, places: Places) -> Places:
        text.step()
        return (places & text.places(is_in)) << 1

    return node


def in_turn(parts: list[Node]) -> Node:
    """One part behind the other."""

    def node(text: Text, places: Places) -> Places:
        for part in parts:
            if not places:
                break
            places = part(text, places)
        return places

    return node


def any_of(branches: list[Node]) -> Node:
    """Any of the branches."""

    def node(text: Text, places: Places) -> Places:
        ends = 0
        for branch in branches:
            text.step()
            ends |= branch(text, places)
        return ends

    return node


def repeated(part: Node, least: int, most: int | None) -> Node:
    """`least` to `most` times; None: any number of times."""

    def node(text: Text, places: Places) -> Places:
        for _ in range(least):
            text.step()
            places = part(text, places)
        ends = new = places
        turns = 0
        while new and (most is None or turns < most - least):
            text.step()
            # Without a limit, a place that was reached before leads nowhere new. With one, too:
            # it was reached with more turns left.
            new = part(text, new) & ~ends
            ends |= new
            turns += 1
        return ends

    return node


def ahead(part: Node, *, wanted: bool) -> Node:
    """Takes nothing; whether `part` would match there, or would not."""

    def node(text: Text, places: Places) -> Places:
        ends = 0
        while places:
            text.step()
            place = places & -places
            places ^= place
            if (part(text, place) != 0) == wanted:
                ends |= place
        return ends

    return node


def at_start(text: Text, places: Places) -> Places:
    """Takes nothing; at the start only."""
    text.step()
    return places & 1


def at_end(text: Text, places: Places) -> Places:
    """Takes nothing; at the end, and before a last newline."""
    text.step()
    ends = 1 << len(text.text)
    if text.text.endswith("\n"):
        ends |= ends >> 1
    return places & ends


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


KINDS: dict[str, IsIn] = {
    "d": str.isdecimal,
    "w": _is_word,
    "s": str.isspace,
    "D": lambda char: not char.isdecimal(),
    "W": lambda char: not _is_word(char),
    "S": lambda char: not char.isspace(),
}


def not_newline(char: str) -> bool:
    """What a dot stands for."""
    return char != "\n"
