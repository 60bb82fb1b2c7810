"""Forms of settings: how one is written, the same way in an option, a variable and a file.

Each stands in a setting's annotation. It reads a text, or raises ValueError naming rule and value;
and it tells the command line and the documentation what it takes.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import core_schema

from legato.cluster.cli.nearest import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_TEXT = 4096
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class Form(ABC):
    """What all have in common. A form may be written as a mapping in a file too: see `join`."""

    metavar = "TEXT"
    choices: tuple[str, ...] = ()

    @abstractmethod
    def read(self, text: str) -> Any:  # noqa: ANN401  # each its own
        """The value; ValueError where it is none."""

    def show(self, value: Any) -> str:  # noqa: ANN401  # as above
        """A value as one may write it."""
        return str(value)

    @property
    def limits(self) -> str:
        """For the documentation: `from 1 to 16`, or nothing."""
        return ""

    def join(self, parts: Mapping[str, str]) -> str | None:
        """The text of a mapping; None where it must be one value."""
        return None

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> Any:  # noqa: ANN401  # pydantic's
        return core_schema.no_info_plain_validator_function(self._validate)

    def _validate(self, text: str) -> Any:  # noqa: ANN401  # as `read`
        if len(text) > MAX_TEXT:
            raise ValueError(f"must have at most {MAX_TEXT} characters, got {len(text)}")
        return self.read(text.strip())


@dataclass(frozen=True)
class Text(Form):
    """Any that is not blank."""

    metavar: str = "TEXT"

    def read(self, text: str) -> str:
        """See Form."""
        if not text:
            *others, last = self.metavar.lower().split("|")
            wanted = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(f"must not be empty: give {wanted}")
        return text


@dataclass(frozen=True)
class Matching(Form):
    """A text of one pattern, which `rule` says in words."""

    pattern: str
    rule: str
    metavar: str
    near: tuple[str, ...] = ()

    def read(self, text: str) -> str:
        """See Form."""
        if re.fullmatch(self.pattern, text) is None:
            raise ValueError(f"must be {self.rule}, got {text!r}{did_you_mean(text, self.near)}")
        return text


@dataclass(frozen=True)
class Choice(Form):
    """One of some words."""

    choices: tuple[str, ...]

    @property
    def metavar(self) -> str:  # type: ignore[override]  # worked out, and never set
        """The words themselves, where they are few."""
        return "|".join(self.choices)

    def read(self, text: str) -> str:
        """See Form."""
        if text not in self.choices:
            words = f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
            raise ValueError(f"must be {words}, got {text!r}{did_you_mean(text, self.choices)}")
        return text


@dataclass(frozen=True)
class Switch(Form):
    """True or false."""

    metavar: str = ""
    choices: tuple[str, ...] = ("true", "false")

    def read(self, text: str) -> bool:
        """See Form."""
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError(f"must be true or false, got {text!r}")
        return text.lower() in _TRUE

    def show(self, value: bool) -> str:
        """See Form."""
        return "true" if value else "false"


@dataclass(frozen=True)
class Number(Form):
    """Whole, from `least` to `most`."""

    least: int
    most: int | None = None
    metavar: str = "N"

    @property
    def limits(self) -> str:
        """See Form."""
        return f"at least {self.least}" if self.most is None else f"{self.least} to {self.most}"

    def read(self, text: str) -> int:
        """See Form."""
        number = int(text) if re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII) else None
        if number is None or number < self.least or (self.most and number > self.most):
            most = "at least {0}" if self.most is None else "in [{0}, {1}]"
            limit = most.format(self.least, self.most)
            raise ValueError(f"must be a whole number {limit}, got {text!r}")
        return number


@dataclass(frozen=True)
class Real(Form):
    """A number from `least` on, below `below` where there is such a limit."""

    least: float
    below: float = math.inf
    metavar: str = "X"

    @property
    def limits(self) -> str:
        """See Form."""
        return self._rule

    @property
    def _rule(self) -> str:
        if self.below == math.inf:
            return f"at least {self.least:g}"
        return f"in [{self.least:g}, {self.below:g})"

    def read(self, text: str) -> float:
        """See Form."""
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not self.least <= number < self.below:
            raise ValueError(f"must be a number {self._rule}, got {text!r}")
        return number

    def show(self, value: float) -> str:
        """See Form."""
        return f"{value:g}"
