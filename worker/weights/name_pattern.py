"""NamePattern: a regular expression out of a checkpoint's config, matched in bounded time.

`re` tries one way after another through a pattern, and a hostile one has more of them than anybody
can wait for. Here all ways are followed at once: a set of places in the text goes in at the front
of the pattern, and the set of places where it can end comes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_CHARS = 1000  # of a pattern
MAX_DEPTH = 20  # of its groups
MAX_COUNT = 1000  # in {m,n}
# For all matches of one checkpoint: about 2 s. 1000 layers and three patterns take a fifth.
MAX_STEPS = 10_000_000
_SPECIAL = frozenset(r".^$*+?{}[]\|()")
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}

# Bit i of a set of places stands for the place before character i.
_Places: TypeAlias = int
_Node: TypeAlias = "Callable[[_Text, _Places], _Places]"
_IsIn: TypeAlias = "Callable[[str], bool]"


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
            raise TooManyStepsError("the patterns are too costly to match")


class NamePattern:
    """Knows what real configs use, with the meaning that `re.match` gives it: literal characters,
    `.`, classes, `\\d \\w \\s` and their opposites, `^ $`, groups, `|`, look-ahead, and the
    quantifiers `* + ? {m,n}`.
    """

    def __init__(self, pattern: str) -> None:
        """
        Raises:
            ValueError: it is no regular expression, or uses something else.
        """
        if len(pattern) > MAX_CHARS:
            raise ValueError(f"has {len(pattern)} characters, at most {MAX_CHARS} are allowed")
        parser = _Parser(pattern)
        self._node = parser.alternatives()
        if parser.at < len(pattern):
            raise parser.error("an unmatched )")

    def matches(self, text: str, budget: Budget) -> bool:
        """Whether it matches at the start of `text`, as `re.match` has it.

        Raises:
            TooManyStepsError: the budget is spent.
        """
        return self._node(_Text(text, budget), 1) != 0


class _Text:
    """What is matched, and where in it the characters of each kind are."""

    def __init__(self, text: str, budget: Budget) -> None:
        self.text = text
        self.budget = budget
        self._cost = 1 + len(text) // 64  # of a step: the sets have as many bits as the text
        self._places: dict[_IsIn, _Places] = {}

    def step(self) -> None:
        self.budget.spend(self._cost)

    def places(self, is_in: _IsIn) -> _Places:
        found = self._places.get(is_in)
        if found is None:
            self.budget.spend(1 + len(self.text))
            bits = "".join("1" if is_in(char) else "0" for char in reversed(self.text))
            found = self._places[is_in] = int(bits or "0", 2)
        return found


def _one(is_in: _IsIn) -> _Node:
    def node(text: _Text, places: _Places) -> _Places:
        text.step()
        return (places & text.places(is_in)) << 1

    return node


def _in_turn(parts: list[_Node]) -> _Node:
    def node(text: _Text, places: _Places) -> _Places:
        for part in parts:
            if not places:
                break
            places = part(text, places)
        return places

    return node


def _any_of(branches: list[_Node]) -> _Node:
    def node(text: _Text, places: _Places) -> _Places:
        ends = 0
        for branch in branches:
            ends |= branch(text, places)
        return ends

    return node


def _repeated(part: _Node, least: int, most: int | None) -> _Node:
    def node(text: _Text, places: _Places) -> _Places:
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


def _ahead(part: _Node, *, wanted: bool) -> _Node:
    def node(text: _Text, places: _Places) -> _Places:
        ends = 0
        while places:
            text.step()
            place = places & -places
            places ^= place
            if (part(text, place) != 0) == wanted:
                ends |= place
        return ends

    return node


def _start(text: _Text, places: _Places) -> _Places:
    return places & 1


def _end(text: _Text, places: _Places) -> _Places:
    """Also before a last newline."""
    ends = 1 << len(text.text)
    if text.text.endswith("\n"):
        ends |= ends >> 1
    return places & ends


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


_KINDS: dict[str, _IsIn] = {
    "d": str.isdecimal,
    "w": _is_word,
    "s": str.isspace,
    "D": lambda char: not char.isdecimal(),
    "W": lambda char: not _is_word(char),
    "S": lambda char: not char.isspace(),
}


def _not_newline(char: str) -> bool:
    return char != "\n"


class _Parser:
    """Walks the pattern; `at` is the index of the next character."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self._depth = 0
        self._literals: dict[str, _IsIn] = {}

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{problem} at character {self.at}")

    def alternatives(self) -> _Node:
        branches = [self._branch()]
        while self._take("|"):
            branches.append(self._branch())
        return branches[0] if len(branches) == 1 else _any_of(branches)

    def _take(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.at)
        if found:
            self.at += len(text)
        return found

    def _next(self) -> str:
        if self.at == len(self.pattern):
            raise self.error("an unfinished pattern")
        self.at += 1
        return self.pattern[self.at - 1]

    def _branch(self) -> _Node:
        parts = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            parts.append(self._quantified())
        return _in_turn(parts)

    def _quantified(self) -> _Node:
        part, repeatable = self._atom()
        bounds = self._quantifier()
        if bounds is None:
            return part
        if not repeatable:
            raise self.error("nothing to repeat")
        if self._take("+"):
            raise self.error("a possessive quantifier, which is not supported,")
        self._take("?")  # lazy: the same texts match
        if self._quantifier() is not None:
            raise self.error("a quantifier of a quantifier")
        return _repeated(part, *bounds)

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        if not self._take("{"):
            return None
        least, comma, most = self._until("}").partition(",")
        if not all(text.isascii() and text.isdigit() for text in (least, most) if text) or not (
            least or most
        ):
            raise self.error("a { that is no quantifier, which is not supported,")
        if (
            max(len(least), len(most)) > 4
            or int(least or 0) > MAX_COUNT
            or int(most or 0) > MAX_COUNT
        ):
            raise self.error(f"a count above {MAX_COUNT}")
        low = int(least or 0)
        high = int(most) if most else None if comma else low
        if high is not None and high < low:
            raise self.error("a quantifier whose least is above its most")
        return low, high

    def _until(self, sign: str) -> str:
        stop = self.pattern.find(sign, self.at)
        if stop < 0:
            raise self.error(f"no {sign}")
        text = self.pattern[self.at : stop]
        self.at = stop + 1
        return text

    def _atom(self) -> tuple[_Node, bool]:
        """And whether a quantifier may follow."""
        char = self._next()
        match char:
            case "(":
                return self._group()
            case "[":
                return _one(self._class()), True
            case ".":
                return _one(_not_newline), True
            case "^":
                return _start, False
            case "$":
                return _end, False
            case "\\":
                return _one(self._escaped()), True
        if char in _SPECIAL - {"]", "}"}:
            self.at -= 1
            raise self.error(f"{char}, which cannot stand there,")
        return _one(self._literal(char)), True

    def _group(self) -> tuple[_Node, bool]:
        wanted: bool | None = None
        if self._take("?"):
            kind = self._next()
            if kind not in ":=!":
                raise self.error(f"(?{kind}, which is not supported,")
            wanted = None if kind == ":" else kind == "="
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self.error(f"groups deeper than {MAX_DEPTH}")
        inner = self.alternatives()
        self._depth -= 1
        if not self._take(")"):
            raise self.error("a missing )")
        return (inner, True) if wanted is None else (_ahead(inner, wanted=wanted), False)

    def _literal(self, char: str) -> _IsIn:
        return self._literals.setdefault(char, lambda other: other == char)

    def _escaped(self) -> _IsIn:
        char = self._next()
        if char in _KINDS:
            return _KINDS[char]
        return self._literal(self._escaped_char(char))

    def _escaped_char(self, char: str) -> str:
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char.isascii() and char.isalnum():
            raise self.error(f"\\{char}, which is not supported,")
        return char

    def _class(self) -> _IsIn:
        negated = self._take("^")
        ranges: list[tuple[str, str]] = []
        kinds: list[_IsIn] = []
        first = True
        while first or not self._take("]"):
            first = False
            low = self._class_item(kinds)
            if low is None:
                continue
            high = low
            if self.pattern.startswith("-", self.at) and not self.pattern.startswith("-]", self.at):
                self.at += 1
                end = self._class_item(kinds)
                if end is None or end < low:
                    raise self.error("a bad range")
                high = end
            ranges.append((low, high))

        def is_in(char: str) -> bool:
            found = any(a <= char <= b for a, b in ranges) or any(kind(char) for kind in kinds)
            return found != negated

        return is_in

    def _class_item(self, kinds: list[_IsIn]) -> str | None:
        """A character; None for a kind of them."""
        char = self._next()
        if char != "\\":
            return char
        char = self._next()
        if char in _KINDS:
            kinds.append(_KINDS[char])
            return None
        return self._escaped_char(char)
