"""read_trace: recorded traffic, a JSON line a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from legato.plan.lengths import MAX_TOKENS

if TYPE_CHECKING:
    from pathlib import Path

MAX_LINES = 1_000_000
MAX_LINE_CHARACTERS = 4096


class TraceLine(BaseModel):
    """One request. `at_s`: since the trace began; all lines have it, or none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    at_s: float | None = Field(None, ge=0, allow_inf_nan=False)
    input_tokens: int = Field(ge=1, le=MAX_TOKENS)
    output_tokens: int = Field(ge=1, le=MAX_TOKENS)


def read_trace(path: Path) -> list[TraceLine]:
    """The lines, in the order of their times.

    Raises:
        ValueError: naming file, line and what is wrong.
    """
    lines: list[TraceLine] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(iter(lambda: file.readline(MAX_LINE_CHARACTERS), ""), 1):
                if number > MAX_LINES:
                    raise ValueError(f"{path}: has more than {MAX_LINES:,} lines")
                if text.strip():
                    lines.append(_line(f"{path}:{number}", text))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no UTF-8 text, from byte {error.start} on") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    if not lines:
        raise ValueError(f"{path}: holds no request")
    if len({line.at_s is None for line in lines}) > 1:
        raise ValueError(f"{path}: some lines have at_s and some have none")
    return sorted(lines, key=lambda line: line.at_s or 0.0)


def _line(place: str, text: str) -> TraceLine:
    try:
        return TraceLine.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "the line"
        given = str(first["input"])[:60]
        raise ValueError(f"{place}: {name}: {first['msg']}, got {given!r}") from error
