"""What a guide may be: every limit, named with field and value, and met in bounded time."""

from __future__ import annotations

import json
import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from guide_cases import CASES
from llguidance import LLMatcher
from tiny_models import VOCAB_SIZE, write_byte_tokenizer

from legato.protos import common_pb2
from legato.text import guide_book, guide_schema
from legato.text.guide import MAX_GUIDE_BYTES, Guide
from legato.text.guide_book import GuideBook
from legato.text.guide_probe import probe_grammar
from legato.text.guide_vocabulary import GuideVocabulary

if TYPE_CHECKING:
    from pathlib import Path

GuideChoice = common_pb2.GuideChoice
NEWEST = "https://json-schema.org/draft/2020-12/schema"


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> GuideBook:
    folder: Path = tmp_path_factory.mktemp("text")
    write_byte_tokenizer(folder)
    return GuideBook(lambda: GuideVocabulary.load(folder, VOCAB_SIZE), probe=lambda _: None)


def try_to_open(book: GuideBook, **fields: Any) -> None:  # noqa: ANN401  # of the message
    guide = Guide.read(common_pb2.Guide(**fields))
    book.open(guide, eos_token_ids=[257], stop_token_ids=[], ignore_eos=False)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({}, r"sampling\.guide is empty, limit exactly one of json_schema, json_object, regex"),
        ({"json_object": False}, r"json_object is False, limit True or not set"),
        ({"regex": ""}, r"regex is empty, limit at least 1 character"),
        ({"grammar": ""}, r"grammar is empty"),
        ({"json_schema": ""}, r"json_schema is empty"),
        ({"regex": "a" * MAX_GUIDE_BYTES}, r"guide has 65540 bytes, limit 65536"),
        ({"choice": GuideChoice()}, r"choice\.texts has 0 entries, limit \[1, 1024\]"),
        ({"choice": GuideChoice(texts=["a"] * 1025)}, r"choice\.texts has 1025 entries, limit"),
        ({"choice": GuideChoice(texts=["a", ""])}, r"choice\.texts\[1\] is empty, limit at least"),
        ({"json_schema": "{"}, r"json_schema is '{', no JSON"),
        ({"json_schema": "[]"}, r"json_schema is '\[\]', limit a JSON object"),
        ({"json_schema": '{"a":' * 65 + "1" + "}" * 65}, r"nested 65 deep or deeper, limit 64"),
        ({"json_schema": "[" * 60_000}, r"nested 65 deep or deeper, limit 64"),
        ({"regex": "x?" * 257}, r"regex has 257 repetitions, options and multiples, limit 256"),
        ({"regex": "x{0,3}" * 10_000}, r"regex has 10000 repetitions"),
        ({"regex": "(|a)" * 10_000}, r"regex has 10000 repetitions"),
        ({"grammar": "start: " + '["x"] ' * 300}, r"grammar has 300 repetitions"),
        (
            {"json_schema": json.dumps({"allOf": [{"pattern": "^a*b*$"}] * 200})},
            r"json_schema has \d+ repetitions",
        ),
        (
            {"json_schema": json.dumps({"patternProperties": {"a*" * 300: True}})},
            r"json_schema has 308 repetitions",
        ),
        (
            {"json_schema": json.dumps({"prefixItems": [{"multipleOf": i} for i in range(200)]})},
            r"json_schema has \d+ repetitions",
        ),
        (
            {"json_schema": json.dumps({"patternProperties": {f"k{i}": {} for i in range(40)}})},
            r"json_schema has 320 repetitions",
        ),
        (
            {"json_schema": json.dumps({"allOf": [{"pattern": f"a{i}"} for i in range(70)]})},
            r"json_schema has 280 repetitions",
        ),
        (
            {"json_schema": json.dumps({"items": [{"$ref": "#", "pattern": "a"}] * 65})},
            r"json_schema has 260 repetitions",
        ),
        ({"json_schema": json.dumps({"items": [{"$ref": "#"}] * 257})}, r"257 references, limit"),
        ({"grammar": "start: a\n" + "a: b\n" * 256}, r"grammar has 257 rules, limit 256"),
        ({"regex": "a(b"}, r"sampling\.guide\.regex: unclosed group"),
        ({"regex": r"(a)\1"}, r"sampling\.guide\.regex: backreferences are not supported"),
        ({"regex": r"[^\s\S]"}, r"regex: no text that the model can write keeps to it"),
        ({"json_schema": '{"type": "strong"}'}, r"sampling\.guide\.json_schema: "),
        ({"json_schema": '{"enum": []}'}, r"sampling\.guide\.json_schema: "),
        (
            {"json_schema": '{"unevaluatedItems": false}'},
            r"keyword 'unevaluatedItems', w",
        ),
        ({"json_schema": '{"maxLenght": 3}'}, r"not understood; did you mean maxLength\?"),
        ({"json_schema": '{"anyOf": [{"$defs": {"a": {"items": {"nul": 1}}}}]}'}, r"keyword 'nul'"),
        (
            {"json_schema": '{"not": {}, "$schema": "http://json-schema.org/draft-04/schema#"}'},
            "'n",
        ),
        ({"json_schema": '{"not": {}, "x-guidance": {"lenient": true}}'}, r"keyword 'not', which"),
        ({"json_schema": '{"x-guidance": {"coerce_one_of": true}}'}, r"keyword 'x-guidance', wh"),
        ({"json_schema": '{"type": "object", "type": "array"}'}, r"'type' twice in one object"),
        ({"json_schema": '{"enum": [{"a": 1, "b": 2, "a": 3}]}'}, r"json_schema has 'a' twice in"),
        ({"grammar": "start: other"}, r"sampling\.guide\.grammar: "),
        ({"grammar": "start: <[256]>"}, r"grammar: no text of at least one token keeps to it"),
        ({"grammar": 'start: ""'}, r"grammar: no text of at least one token keeps to it"),
    ],
)
def test_what_is_refused(book: GuideBook, fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what) as error:
        try_to_open(book, **fields)
    assert str(error.value).startswith("sampling.guide")
    assert len(str(error.value)) < 300
    assert str(error.value).isprintable()


def test_question_marks_in_descriptions_are_no_repetitions(book: GuideBook) -> None:
    described = {"type": "string", "description": "Is it red? Or blue? " * 300, "maxLength": 3}
    try_to_open(book, json_schema=json.dumps({"type": "object", "properties": {"a": described}}))


def test_brackets_in_strings_nest_nothing(book: GuideBook) -> None:
    try_to_open(book, json_schema=json.dumps({"enum": ["[" * 100, '"' + "{" * 100, "\\" * 9]}))


RULES: dict[str, tuple[dict[str, Any], str, str]] = {  # a schema, what keeps to it, what does not
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, "null", "1"),
    "additionalItems": (
        {"type": "array", "items": [{"const": 1}], "additionalItems": False},
        "[1]",
        "[1,2]",
    ),
    "additionalProperties": ({"type": "object", "additionalProperties": False}, "{}", '{"a":1}'),
    "allOf": ({"allOf": [{"minimum": 2}, {"type": "integer"}]}, "2", "1"),
    "anyOf": ({"anyOf": [{"const": 1}, {"const": 2}]}, "2", "3"),
    "const": ({"const": 1}, "1", "2"),
    "enum": ({"enum": [1, 2]}, "2", "3"),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 5}, "4", "5"),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 5}, "6", "5"),
    "format": ({"type": "string", "format": "date"}, '"2020-01-01"', '"x"'),
    "items": ({"type": "array", "items": {"const": 1}}, "[1]", "[2]"),
    "maxItems": ({"type": "array", "maxItems": 1}, "[1]", "[1,1]"),
    "maxLength": ({"type": "string", "maxLength": 1}, '"a"', '"aa"'),
    "maxProperties": ({"type": "object", "maxProperties": 1}, '{"a":1}', '{"a":1,"b":1}'),
    "maximum": ({"type": "integer", "maximum": 5}, "5", "6"),
    "minItems": ({"type": "array", "minItems": 1}, "[1]", "[]"),
    "minLength": ({"type": "string", "minLength": 1}, '"a"', '""'),
    "minProperties": ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
    "minimum": ({"type": "integer", "minimum": 5}, "5", "4"),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, "10", "11"),
    "oneOf": ({"oneOf": [{"type": "null"}, {"type": "integer"}]}, "null", "true"),
    "pattern": ({"type": "string", "pattern": "^a$"}, '"a"', '"b"'),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^a$": {"const": 1}}},
        '{"a":1}',
        '{"a":2}',
    ),
    "prefixItems": ({"type": "array", "prefixItems": [{"const": 1}]}, "[1]", "[2]"),
    "properties": ({"type": "object", "properties": {"a": {"const": 1}}}, '{"a":1}', '{"a":2}'),
    "required": ({"type": "object", "required": ["a"]}, '{"a":1}', "{}"),
    "type": ({"type": "null"}, "null", "1"),
}


@pytest.mark.parametrize(
    ("draft", "num_refused"),
    [
        (None, 0),
        ("https://json-schema.org/draft/2020-12/schema", 0),
        ("https://json-schema.org/draft/2019-09/schema", 1),
        ("http://json-schema.org/draft-07/schema#", 1),
        ("http://json-schema.org/draft-06/schema#", 1),
        ("http://json-schema.org/draft-04/schema#", 7),  # all of those with a const in them too
    ],
)
def test_every_keyword_that_is_taken_holds(
    book: GuideBook, draft: str | None, num_refused: int
) -> None:
    assert RULES.keys() == guide_schema._RULES
    for keyword, (rule, good, bad) in RULES.items():
        schema = rule if draft is None else {**rule, "$schema": draft}
        try:
            guide = Guide.read(common_pb2.Guide(json_schema=json.dumps(schema)))
        except ValueError as error:
            assert "which its $schema has not" in str(error)  # noqa: PT017  # most are taken
            num_refused -= 1
            continue
        for text, keeps in ((good, True), (bad, False)):
            matcher = book.open(guide, eos_token_ids=[257], stop_token_ids=[], ignore_eos=False)
            try:
                matcher.advance(list(text.encode()))
                may_end = matcher.source.is_accepting()
            except ValueError:
                may_end = False
            assert may_end == keeps, (keyword, text)
    assert num_refused == 0


def test_remarks_and_words_of_others_are_taken(book: GuideBook) -> None:
    schema = dict.fromkeys(guide_schema._REMARKS - {"$defs", "definitions"}, "x")
    names = {"properties": {"not": {"type": "null"}, "maxLenght": True}, "x-order": {"not": 1}}
    try_to_open(book, json_schema=json.dumps({**schema, **names, "$schema": NEWEST, "$id": "a:b"}))


def test_every_case_can_be_opened(book: GuideBook) -> None:
    for case in CASES:
        book.open(case.guide, eos_token_ids=[257], stop_token_ids=[], ignore_eos=False)


def random_schema(dice: random.Random, depth: int) -> object:
    kinds = ["string", "integer", "number", "boolean", "null", "enum"]
    match dice.choice([*kinds, *(["object", "array", "anyOf"] if depth else [])]):
        case "object":
            names = [f"p{i}" for i in range(dice.randint(0, 12))]
            properties = {name: random_schema(dice, depth - 1) for name in names}
            return {"type": "object", "properties": properties, "required": names[::2]}
        case "array":
            most = dice.choice((3, 10**6))
            return {"type": "array", "items": random_schema(dice, depth - 1), "maxItems": most}
        case "anyOf":
            return {"anyOf": [random_schema(dice, depth - 1) for _ in range(dice.randint(1, 5))]}
        case "string":
            return {"type": "string", "minLength": dice.choice((0, 5000)), "maxLength": 10**5}
        case "enum":
            return {"enum": [dice.randrange(10**9) for _ in range(dice.randint(1, 200))]}
        case kind:
            return {"type": kind}


def chained(length: int) -> str:
    """Each definition leads to the next: much deeper and llguidance's recursion would have no stack
    left, and the process would end.
    """
    definitions: dict[str, object] = {
        f"d{i}": {"properties": {"k": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)
    }
    definitions[f"d{length}"] = {"type": "integer"}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


def test_hostile_guides_are_decided_soon(book: GuideBook) -> None:
    """As large as they may be. The times are processor's: the machine may be busy."""
    dice = random.Random(2)
    guides: list[dict[str, Any]] = [
        {"regex": ".*" * 256},
        {"regex": r"\p{L}*" * 256},
        {"regex": r"\p{L}" * 12_000},
        {"regex": "(a{1,1000}){1,1000}"},
        {"regex": r"((\p{L}*\p{N}*){100}){100}"},
        {"regex": "[ab]*a[ab]{1000}"},
        {"regex": "(" * 30_000 + "a" + ")" * 30_000},
        {"regex": "|".join(f"{i:05}" for i in range(10_000))},
        {"choice": GuideChoice(texts=[f"{i}" * 12 for i in range(1024)])},
        {"grammar": "start: a\na: a a | b\nb: " + " | ".join(f'"{i}"' for i in range(3000))},
        {"json_schema": json.dumps({"enum": [f"v{i}" for i in range(5000)]})},
        {"json_schema": json.dumps({"properties": {f"p{i}": {} for i in range(1500)}})},
        {"json_schema": chained(250)},
        {"json_schema": json.dumps({"patternProperties": {f"k{i}": {} for i in range(30)}})},
        {
            "grammar": "start: r0\n"
            + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(250))
            + "r250: /y/"
        },
        *({"json_schema": json.dumps(random_schema(dice, 5))} for _ in range(40)),
    ]
    num_refused = 0
    for fields in guides:
        started_s = time.process_time()
        try:
            try_to_open(book, **fields)
        except ValueError as error:
            assert "sampling.guide" in str(error)  # noqa: PT017  # most are well
            num_refused += 1
        assert time.process_time() - started_s < 2.0, str(fields)[:100]
    assert num_refused < len(guides) // 2


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"allOf": [{"pattern": f"a{i}"} for i in range(32)]}),  # 2^32 states
        chained(3000),
    ],
    ids=["exponential", "recursion"],
)
def test_what_would_hang_or_end_the_process_is_tried_in_another(text: str) -> None:
    with pytest.raises(ValueError, match="it cannot be compiled within the limits of 1 s and"):
        probe_grammar(LLMatcher.grammar_from_json_schema(text))
    probe_grammar(LLMatcher.grammar_from_json_schema(chained(100)))


def test_a_guide_is_checked_once_and_few_are_remembered(
    book: GuideBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    check = guide_book._checked

    def counting(guide: Guide, *more: Any) -> str:  # noqa: ANN401  # passed on
        checked.append(guide.texts[0])
        return check(guide, *more)

    monkeypatch.setattr(guide_book, "_checked", counting)
    for _ in range(3):
        try_to_open(book, regex="once")
    assert checked == ["once"]
    for number in range(guide_book.MAX_CHECKED):
        try_to_open(book, regex=f"number {number}")
    try_to_open(book, regex="once")
    assert checked.count("once") == 2
    assert len(book._grammars) == guide_book.MAX_CHECKED
