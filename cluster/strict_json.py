"""parse_json: JSON that means one thing only, or what is wrong with it, in words to mend it by."""

from __future__ import annotations

import json
import re

from pydantic_core import from_json

from legato.cluster.errors import shown

_PLACE = re.compile(r"line (\d+) column (\d+)")
_NO_NUMBER = re.compile(rb".?-?(NaN|Inf)")


def parse_json(data: bytes, what: str, *, one_line: bool = False) -> object:
    """A value in UTF-8, without NaN, infinity, half a surrogate pair, a key twice in one object and
    more than 200 levels. `one_line`: there is but one, which is not counted.

    Raises:
        ValueError: a sentence that begins with `what`.
    """
    try:
        # jiter: it ends at 200 levels, and takes neither NaN nor half a surrogate pair.
        value: object = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        told = _told(data, str(error))
        if one_line:
            told = told.replace(" at line 1 column ", " at column ")
        raise ValueError(f"{what} {told}") from error
    if isinstance(value, dict) and data.count(b":") == len(value):  # as of a million token ids
        return value
    try:
        json.loads(data, object_pairs_hook=_without_doubles)  # of which jiter takes the last
    except _DoubleKeyError as error:
        raise ValueError(f"{what} has {error} twice in one object, limit once") from None
    return value


class _DoubleKeyError(Exception):
    """With the key, as it is shown."""


def _without_doubles(pairs: list[tuple[str, object]]) -> None:
    if len(dict(pairs)) == len(pairs):
        return
    keys = set()
    for key, _ in pairs:
        if key in keys:
            raise _DoubleKeyError(shown(key))
        keys.add(key)


def _told(data: bytes, error: str) -> str:
    """The parser's error, about `data`, in words that tell what to change."""
    if not data.strip():
        return "is empty, limit a JSON object"
    if data.startswith(b"\xef\xbb\xbf"):
        return "begins with a byte order mark, limit UTF-8 without one"
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        return f"is not UTF-8 at byte {wrong.start}, limit JSON in UTF-8"
    what, _, where = error.partition(" at line ")
    where = f"at line {where}"
    if what == "recursion limit exceeded":
        return f"nests too deep {where}, limit 200 levels"
    if "hex escape" in what or "surrogate" in what:
        return f"has half a surrogate pair, or a cut escape, {where}, limit whole characters"
    if what == "number out of range":
        return f"has a number of too many digits {where}, limit 4300"
    if what in ("expected value", "invalid number"):
        place = _PLACE.search(where)
        line = data.split(b"\n")[int(place[1]) - 1] if place is not None else b""
        begin = max(0, int(place[2]) - 2) if place is not None else 0
        if _NO_NUMBER.match(line[begin : begin + 12]):
            return f"has NaN or Infinity {where}, limit finite numbers"
    return f"is no JSON {where}: {what}"
