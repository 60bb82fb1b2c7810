"""Guide: what the text of an answer must be, checked against every limit but those of compiling."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from legato.text.guide_schema import REPETITION, check_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from legato.protos import common_pb2

MAX_GUIDE_BYTES = 1 << 16
MAX_CHOICES = 1024
# llguidance's own limits do not bound how long it takes to compile a row of many parts that may
# each be absent: seconds and a gigabyte for 10,000 of them.
MAX_REPETITIONS = 256
# It goes as deep into rules and references as they lead: 1,000 may end the process.
MAX_REFERENCES = 256
_REFERENCE = {
    "json_schema": re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)"'),
    "grammar": re.compile(":"),
}
_LARK_REPETITION = re.compile(rf"{REPETITION.pattern}|[\[~]")
# Models are known to write white space without end where a schema lets them.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
_FIELD = "sampling.guide"


@dataclass(frozen=True)
class Guide:
    """Equal ones allow the same answers."""

    kind: str  # the field of common.proto's Guide
    texts: tuple[str, ...]  # several for a choice only

    @classmethod
    def read(cls, message: common_pb2.Guide) -> Guide:
        """Costs no more than the message is long.

        Raises:
            ValueError: naming field, value and limit.
        """
        if message.ByteSize() > MAX_GUIDE_BYTES:
            raise ValueError(f"{_FIELD} has {message.ByteSize()} bytes, limit {MAX_GUIDE_BYTES}")
        kind = message.WhichOneof("kind")
        match kind:
            case None:
                raise ValueError(
                    f"{_FIELD} is empty, limit exactly one of json_schema, json_object, regex, "
                    "choice, grammar"
                )
            case "json_object":
                if not message.json_object:
                    raise ValueError(f"{_FIELD}.json_object is False, limit True or not set")
                return cls(kind, ("",))
            case "choice":
                return cls(kind, _checked_choice(message.choice.texts))
            case _:
                text = str(getattr(message, kind))
                if not text:
                    raise ValueError(f"{_FIELD}.{kind} is empty, limit at least 1 character")
                if kind in _REFERENCE:
                    num_references = len(_REFERENCE[kind].findall(text))
                    if num_references > MAX_REFERENCES:
                        what = "rules" if kind == "grammar" else "references"
                        raise ValueError(
                            f"{_FIELD}.{kind} has {num_references} {what}, limit {MAX_REFERENCES}"
                        )
                if kind == "json_schema":
                    count = check_schema(f"{_FIELD}.json_schema", text)
                else:
                    costly = _LARK_REPETITION if kind == "grammar" else REPETITION
                    count = len(costly.findall(text))
                if count > MAX_REPETITIONS:
                    raise ValueError(
                        f"{_FIELD}.{kind} has {count} repetitions, options and multiples, limit "
                        f"{MAX_REPETITIONS}"
                    )
                return cls(kind, (text,))

    @property
    def field(self) -> str:
        """Its name in sentences."""
        return f"{_FIELD}.{self.kind}"

    def grammar(self) -> str:
        """As llguidance takes it.

        Raises:
            ValueError: what llguidance says of a schema.
        """
        [text] = self.texts if self.kind != "choice" else [""]
        match self.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
            case "json_object":
                return LLMatcher.grammar_from_json_schema(
                    '{"type":"object"}', overrides=_JSON_OPTIONS
                )
            case "regex":
                return LLMatcher.grammar_from_regex(text)
            case "choice":
                words = [json.dumps(word, ensure_ascii=False) for word in self.texts]
                return LLMatcher.grammar_from_lark("start: " + " | ".join(words))
            case _:
                return LLMatcher.grammar_from_lark(text)


def _checked_choice(texts: Any) -> tuple[str, ...]:  # noqa: ANN401  # a repeated field has no name
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise ValueError(
            f"{_FIELD}.choice.texts has {len(texts)} entries, limit [1, {MAX_CHOICES}]"
        )
    for index, text in enumerate(texts):
        if not text:
            raise ValueError(f"{_FIELD}.choice.texts[{index}] is empty, limit at least 1 character")
    return tuple(dict.fromkeys(texts))
