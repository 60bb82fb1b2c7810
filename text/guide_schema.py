"""check_schema: what a guide's JSON schema may be, before anything is compiled of it."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

from legato.protos.printable import shown

MAX_DEPTH = 64
# Parts of an expression that may each be absent, or may be such.
REPETITION = re.compile(r'[*+?]|\{\s*\d|\(\||\|\||\|\)|"multipleOf"')
_MULTIPLE_COST, _BOTH_COST, _NAMES_COST = 2, 4, 8
# What llguidance holds an answer to. Others that the drafts know it refuses by itself, though not
# under every `$schema`; those that nobody knows it takes for remarks, and what was meant would not
# hold. In `x-guidance` a schema could tell it to overlook the rest.
_RULES = frozenset(
    [
        "$ref",
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "required",
        "type",
    ]
)
_REMARKS = frozenset(
    [
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "id",
        "readOnly",
        "title",
        "writeOnly",
        "xml",
    ]
)
# By what a `$schema` says: llguidance takes these for remarks then.
_WITHOUT = {
    "draft-04": frozenset(["const", "prefixItems"]),
    "draft-06": frozenset(["prefixItems"]),
    "draft-07": frozenset(["prefixItems"]),
    "2019-09": frozenset(["prefixItems"]),
}
_OWN = "x-"  # of whoever reads the schema beside us
_LLGUIDANCES = "x-guidance"
# Where schemas stand in a schema: as values of a mapping, in a list, or alone.
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")
_PARTS = (
    "allOf",
    "anyOf",
    "oneOf",
    "prefixItems",
    "items",
    "additionalItems",
    "additionalProperties",
)


def check_schema(field: str, text: str) -> int:
    """How many repetitions are in its patterns, multiples included.

    Raises:
        ValueError: naming `field`, value and limit.
    """
    # Before it is parsed: parsers go as deep as the text does.
    if (depth := _depth(text)) > MAX_DEPTH:
        raise ValueError(f"{field} is nested {depth} deep or deeper, limit {MAX_DEPTH}")
    try:
        schema = json.loads(text, object_pairs_hook=_once)
    except _TwiceError as error:
        raise ValueError(f"{field} has {error} twice in one object, limit once") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{field} is {shown(text)}, no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"{field} is {shown(text)}, limit a JSON object")
    _check_keywords(field, schema)
    return _num_repetitions(schema)


class _TwiceError(Exception):
    """With the key, as it is shown."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(shown(next(key for key in keys if keys.count(key) > 1)))
    return found


def _check_keywords(field: str, schema: object, without: frozenset[str] = frozenset()) -> None:
    """At most MAX_DEPTH deep. What is of a wrong type is llguidance's to refuse. `without`: rules
    that the schema's draft does not have.
    """
    if isinstance(schema, list):
        for part in schema:
            _check_keywords(field, part, without)
    if not isinstance(schema, dict):
        return
    draft = schema.get("$schema")
    if isinstance(draft, str):
        without = next((names for name, names in _WITHOUT.items() if name in draft), frozenset())
    for key in schema:
        if key in without:
            raise ValueError(
                f"{field} has the keyword {shown(key)}, which its $schema has not, "
                "limit those of 2020-12, or no $schema"
            )
        if key in _RULES or key in _REMARKS:
            continue
        if key.startswith(_OWN) and key != _LLGUIDANCES:
            continue
        near = difflib.get_close_matches(key[:64], sorted(_RULES), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{field} has the keyword {shown(key)}, which is not understood{hint}")
    for name in _MAPPINGS:
        named = schema.get(name)
        for part in named.values() if isinstance(named, dict) else ():
            _check_keywords(field, part, without)
    for name in _PARTS:
        _check_keywords(field, schema.get(name), without)


def _num_repetitions(value: object) -> int:
    """At most MAX_DEPTH deep."""
    if isinstance(value, list):
        return sum(map(_num_repetitions, value))
    if not isinstance(value, dict):
        return 0
    patterns = [value.get("pattern")]
    count = _MULTIPLE_COST if "multipleOf" in value else 0
    # What has to hold at once is made one automaton: its size is a product.
    if isinstance(several := value.get("allOf"), list):
        count += _BOTH_COST * len(several)
    if "$ref" in value and len(value) > 1:
        count += _BOTH_COST
    if isinstance(named := value.get("patternProperties"), dict):
        count += _NAMES_COST * len(named)
        patterns += named
    count += sum(len(REPETITION.findall(p)) for p in patterns if isinstance(p, str))
    return count + sum(map(_num_repetitions, value.values()))


def _depth(text: str) -> int:
    """How deep brackets nest outside of strings; the count ends above the limit."""
    depth = deepest = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
            if deepest > MAX_DEPTH:
                break
        elif char in "]}":
            depth -= 1
    return deepest
