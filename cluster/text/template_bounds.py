"""Bounds of templates: how much time, text and memory one rendering may take."""

from __future__ import annotations

import re
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import SecurityError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_SIZE = 1 << 24  # of a text or list that one operation makes
MAX_TOTAL_SIZE = 1 << 28  # of all that one rendering makes
MAX_INT_ARGUMENT = 1_000_000
MAX_INT_BITS = 4096
# Field widths in "%" and in str.format strings.
_WIDE_PERCENT = re.compile(r"%[^A-Za-z%]*?(?:\*|\d{7,})")
_WIDE_BRACES = re.compile(r"\{[^{}]*\d{7,}")
# Filters and methods of str whose result can be far larger than what goes in.
_GROWING = frozenset(
    {"center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "pprint"}
    | {"replace", "rjust", "string", "sum", "tojson", "translate", "urlize", "wordwrap"}
    | {"xmlattr", "zfill"}
)


class LimitError(SecurityError):
    """A template went beyond a bound."""


class RenderBudget:
    """What one rendering may still take of time and memory."""

    def __init__(self, time_limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._time_limit_s = time_limit_s
        self._clock = clock
        self._deadline = clock() + time_limit_s
        self._total = 0

    def step(self) -> None:
        """Called at every turn of a loop, call of a macro, call and filter."""
        if self._clock() > self._deadline:
            raise LimitError(f"it ran for more than {self._time_limit_s:g} s")

    def spend(self, size: int) -> None:
        """Counts what an operation made."""
        self._total += size
        if self._total > MAX_TOTAL_SIZE:
            raise LimitError(f"it makes values of more than {MAX_TOTAL_SIZE} items in all")
        self.step()


BUDGET: ContextVar[RenderBudget] = ContextVar("BUDGET")


def taken(items: Any) -> list[Any]:  # noqa: ANN401  # whatever can be iterated over
    """A generator's items, which can then be measured."""
    taken = []
    for item in items:
        BUDGET.get().spend(1)
        taken.append(item)
    return taken


def check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses numbers that could only be meant to make something huge."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and not small(value, MAX_INT_ARGUMENT):
            raise LimitError(f"a number above {MAX_INT_ARGUMENT} as an argument")


def check_growth(name: str, values: tuple[Any, ...]) -> None:
    """Bounds a result by what goes in, before it is made."""
    if name not in _GROWING:
        return
    match values:
        case (str(text), str(old), str(new), *_) if name == "replace":
            check_size(len(text) + text.count(old) * len(new))
        case (left, right, *_) if name == "join":
            items, gap = (right, left) if isinstance(left, str) else (left, right)
            check_size(size(items) + size(items) // 2 * (size(gap) if gap else 0))
        case (str(layout), *arguments) if name in ("format", "format_map"):
            check_format("{", layout, arguments)
        case (subject, *others):
            # A width counts once for each line or tab, a text at worst once for each character.
            for other in others:
                if isinstance(other, int):
                    check_size(other * _num_places(name, subject))
                else:
                    check_size(size(subject) * size(other), MAX_TOTAL_SIZE)
            check_size(size(subject))
            if name == "sum" and others and isinstance(subject, (list, tuple)):
                check_size(len(subject) ** 2, MAX_TOTAL_SIZE)  # lists are copied at each step


def _num_places(name: str, subject: object) -> int:
    if name in ("center", "ljust", "rjust", "zfill"):
        return 1
    if name == "expandtabs" and isinstance(subject, str):
        return subject.count("\t")
    if isinstance(subject, str):
        return 1 + subject.count("\n")
    return size(subject)


def check_format(sign: str, layout: str, arguments: object) -> None:
    """Bounds what a format string makes of its arguments."""
    if (_WIDE_PERCENT if sign == "%" else _WIDE_BRACES).search(layout):
        raise LimitError("a format string with a wide field")
    check_size(len(layout) + layout.count(sign) * size(arguments))


def size(value: object) -> int:
    """Characters that the value may have in print, roughly; stops counting where it is too much."""
    total = 0
    waiting = [value]
    while waiting and total <= MAX_SIZE:
        item = waiting.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            total += 6 * len(item)
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            total += 2 + 2 * len(item)
            waiting += item
        else:
            total += 8
    return total


def checked(value: Any) -> Any:  # noqa: ANN401  # passes it on
    """The value itself, counted."""
    if isinstance(value, (str, list, tuple)):
        check_size(len(value))
        BUDGET.get().spend(len(value))
    elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise LimitError(f"a number of more than {MAX_INT_BITS} bits")
    else:
        BUDGET.get().step()
    return value


def check_size(size: int, limit: int = MAX_SIZE) -> None:
    """Refuses a size beyond the limit."""
    if size > limit:
        raise LimitError(f"it makes a value of {size} items; at most {limit} are allowed")


def small(value: Any, limit: int) -> bool:  # noqa: ANN401  # numbers, or what Jinja will refuse
    """Whether a number is within the limit; what is none is."""
    return not isinstance(value, (int, float)) or abs(value) <= limit
