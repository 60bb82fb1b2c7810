"""Guides of every kind, what tells that a text keeps to one, and walks among the allowed tokens."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jsonschema
import numpy as np

from legato.protos import common_pb2
from legato.text.guide import Guide

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from legato.text.guide_book import GuideBook
    from legato.text.guide_matcher import GuideMatcher


@dataclass(frozen=True)
class Case:
    """One guide; `keeps`: whether a whole text keeps to it."""

    name: str
    message: common_pb2.Guide
    keeps: Callable[[str], bool]

    @property
    def guide(self) -> Guide:
        return Guide.read(self.message)


def schema_case(name: str, schema: object) -> Case:
    def keeps(text: str) -> bool:
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError):
            return False
        return True

    return Case(name, common_pb2.Guide(json_schema=json.dumps(schema)), keeps)


def regex_case(name: str, pattern: str) -> Case:
    message = common_pb2.Guide(regex=pattern)
    return Case(name, message, lambda text: re.fullmatch(pattern, text, re.DOTALL) is not None)


def choice_case(name: str, *texts: str) -> Case:
    message = common_pb2.Guide(choice=common_pb2.GuideChoice(texts=texts))
    return Case(name, message, lambda text: text in texts)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _adds_up(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,3}([+*][0-9]{1,3}|\([0-9]{1,3}\))*", text) is not None


JSON_OBJECT = Case("any object", common_pb2.Guide(json_object=True), _is_object)
SHORT = {"type": "string", "maxLength": 8}
# Each language is finite, or short answers are likely: a random walk comes to its end.
CASES = (
    schema_case(
        "object",
        {
            "type": "object",
            "properties": {"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    ),
    schema_case("enum", {"enum": ["red", "green", 7, None, True, {"a": [1]}]}),
    schema_case("array", {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}),
    schema_case(
        "nested",
        {
            "type": "object",
            "properties": {
                "id": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
                "at": {
                    "type": "object",
                    "properties": {"x": {"enum": [0, 1]}, "y": {"enum": [0, 1]}},
                    "required": ["x", "y"],
                    "additionalProperties": False,
                },
            },
            "required": ["id", "at"],
            "additionalProperties": False,
        },
    ),
    schema_case("any of", {"anyOf": [{"const": "yes"}, {"type": "integer", "maximum": 5}]}),
    schema_case(
        "reference",
        {
            "$defs": {"leaf": {"enum": ["leaf", "twig"]}},
            "type": "array",
            "items": {"$ref": "#/$defs/leaf"},
            "minItems": 1,
            "maxItems": 3,
        },
    ),
    schema_case("text beyond ASCII", {"enum": ["größer", "日本語", "🦊🦊"]}),
    regex_case("digits", r"[0-9]{3}-[0-9]{4}"),
    regex_case("date", r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"),
    regex_case("begins with a space", r" [ab]{2,5}"),
    regex_case("words", r"([a-z]{1,6} ){0,3}[a-z]{1,6}"),
    regex_case("may be empty", r"(x[yz]{0,4})?"),
    regex_case("letters of many scripts", r"[äöüßéàж]{1,6}!"),
    choice_case("choice", "yes", "no", "maybe"),
    choice_case("one is the beginning of another", "a", "ab", "abc", "abd"),
    choice_case("odd characters", 'a "quoted" word', "back\\slash", "new\nline", "<|im_end|>"),
    choice_case("spaces in front", " yes", "  no"),
    Case(
        "grammar",
        common_pb2.Guide(
            grammar='start: number (op number | "(" number ")")*\nop: "+" | "*"\n'
            "number: /[0-9]{1,3}/\n"
        ),
        _adds_up,
    ),
)


def allowed(matcher: GuideMatcher, emitted: Sequence[int]) -> set[int]:
    """The tokens that may follow."""
    matcher.advance(emitted)
    words = np.frombuffer(matcher.source.compute_bitmask(), np.int32).copy()
    matcher.finish(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return {int(index) for index in np.nonzero(bits)[0]}


def opened(book: GuideBook, case: Case, eos: Collection[int]) -> GuideMatcher:
    """At the start of an answer."""
    return book.open(case.guide, eos_token_ids=eos, stop_token_ids=(), ignore_eos=False)


def walk(
    matcher: GuideMatcher, ends: Collection[int], seed: int, most: int = 120
) -> tuple[list[int], list[set[int]]]:
    """Random allowed tokens to the end, without the one that ends it, and what was allowed each
    time. The end is taken half of the times that it may be.
    """
    dice = random.Random(seed)
    text_of = matcher._vocabulary._bytes.__getitem__
    emitted: list[int] = []
    masks: list[set[int]] = []
    while len(emitted) < most:
        masks.append(allowed(matcher, emitted))
        text_ids = sorted(masks[-1] - set(ends))
        if masks[-1] & set(ends) and (not text_ids or dice.random() < 0.5):
            return emitted, masks
        # White space is allowed again and again.
        text_ids = [i for i in text_ids if not text_of(i).isspace()] or text_ids
        emitted.append(dice.choice(text_ids))
    raise AssertionError(f"no end after {most} tokens")
