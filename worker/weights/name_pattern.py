"""NamePattern: a regular expression out of a checkpoint's config, matched in bounded time.

`re` tries one way after another through a pattern, and a hostile one has more of them than anybody
can wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.weights.place_sets import (
    KINDS,
    Text,
    ahead,
    any_of,
    at_end,
    at_start,
    in_turn,
    not_newline,
    one,
    repeated,
)

if TYPE_CHECKING:
    from legato.worker.weights.place_sets import Budget, IsIn, Node

MAX_CHARS = 1000  # of a pattern
MAX_DEPTH = 20  # of its groups
MAX_COUNT = 1000  # in {m,n}
_SPECIAL = frozenset(r".^$*+?{[\|()")
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}


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
        return self._node(Text(text, budget), 1) != 0


class _Parser:
    """Walks the pattern; `at` is the index of the next character."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self._depth = 0
        self._literals: dict[str, IsIn] = {}

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{problem} at character {self.at}")

    def alternatives(self) -> Node:
        branches = [self._branch()]
        while self._take("|"):
            branches.append(self._branch())
        return branches[0] if len(branches) == 1 else any_of(branches)

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

    def _branch(self) -> Node:
        parts = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            parts.append(self._quantified())
        return in_turn(parts)

    def _quantified(self) -> Node:
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
        return repeated(part, *bounds)

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

    def _atom(self) -> tuple[Node, bool]:
        """And whether a quantifier may follow."""
        char = self._next()
        match char:
            case "(":
                return self._group()
            case "[":
                return one(self._class()), True
            case ".":
                return one(not_newline), True
            case "^":
                return at_start, False
            case "$":
                return at_end, False
            case "\\":
                return one(self._escaped()), True
        if char in _SPECIAL:
            self.at -= 1
            raise self.error(f"{char}, which cannot stand there,")
        return one(self._literal(char)), True

    def _group(self) -> tuple[Node, bool]:
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
        return (inner, True) if wanted is None else (ahead(inner, wanted=wanted), False)

    def _literal(self, char: str) -> IsIn:
        return self._literals.setdefault(char, lambda other: other == char)

    def _escaped(self) -> IsIn:
        char = self._next()
        if char in KINDS:
            return KINDS[char]
        return self._literal(self._escaped_char(char))

    def _escaped_char(self, char: str) -> str:
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char.isascii() and char.isalnum():
            raise self.error(f"\\{char}, which is not supported,")
        return char

    def _class(self) -> IsIn:
        negated = self._take("^")
        ranges: list[tuple[str, str]] = []
        kinds: list[IsIn] = []
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

    def _class_item(self, kinds: list[IsIn]) -> str | None:
        """A character; None for a kind of them."""
        char = self._next()
        if char != "\\":
            return char
        char = self._next()
        if char in KINDS:
            kinds.append(KINDS[char])
            return None
        return self._escaped_char(char)
