"""read_fields: a body's fields, of the types that its route takes, and how a wrong one is told."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from legato.cluster.error_reasons import Reason
from legato.cluster.errors import shown
from legato.cluster.http.error_response import wrong_field
from legato.cluster.http.shared_fields import SharedFields

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from legato.cluster.errors import RequestError

MAX_NAME_CHARS = 64  # of what is no field of ours
# With the values that ask for what is done anyway, which clients send that always send the field;
# so does null. Any other asks for what is not there.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
    # vLLM's
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}

# What others call a field of ours.
_ELSEWHERE = {
    "guided_json": "response_format",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "stop_sequences": "stop",
    "structured_outputs": "response_format",
}
# By pydantic's kind of error, which has the name of the type.
_LIMITS = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_parsing_size": "a whole number of 64 bits",
    "float_type": "a number",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "none_required": "null: it is not served",
}

Fields = TypeVar("Fields", bound=SharedFields)


def read_fields(value: dict[str, Any], model: type[Fields]) -> Fields:
    """The request's fields.

    Raises:
        RequestError: one of them is unknown, not served or of another type; the sentence names it.
    """
    for name in [name for name in NOT_SERVED if name in value]:
        asked = value.pop(name)
        if asked is not None and asked not in NOT_SERVED[name]:
            raise wrong_field(name, " is not served by this release", Reason.UNKNOWN_FIELD)
    unknown = next((name for name in value if name not in model.model_fields), None)
    if unknown is not None:
        near = _ELSEWHERE.get(unknown) or next(
            iter(difflib.get_close_matches(unknown[:MAX_NAME_CHARS], model.model_fields, 1, 0.8)),
            None,
        )
        hint = "" if near is None else f"; did you mean {near}?"
        raise wrong_field(_key(unknown), f" is no field of this request{hint}", name=_name(unknown))
    try:
        fields = model.model_validate(value)
    except ValidationError as error:
        raise _wrong(error.errors(include_url=False)[0]) from None
    if fields.stream_options is not None and not fields.stream:
        raise wrong_field("stream_options", " is set, limit requests with stream true")
    return fields


def _name(text: str) -> str:
    return text if text.isidentifier() and len(text) <= MAX_NAME_CHARS else shown(text)


def _key(text: str) -> str:
    """The client's own, for its program to find."""
    return text if len(text) <= MAX_NAME_CHARS else shown(text)


def _wrong(error: ErrorDetails) -> RequestError:
    param, name = "", ""
    for part in error["loc"]:
        if isinstance(part, int):
            param, name = f"{param}[{part}]", f"{name}[{part}]"
        else:
            dot = "." if param else ""
            param, name = f"{param}{dot}{_key(part)}", f"{name}{dot}{_name(part)}"
    rest = _rest(error)
    if rest.startswith(("[", ".")):  # of a check above, which goes on where the name ends
        place, space, rest = rest.partition(" ")
        param, name, rest = param + place, name + place, space + rest
    return wrong_field(param, rest, name=name)


def _rest(error: ErrorDetails) -> str:
    """Of the sentence, behind the field's name."""
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        return " is no field of this request"
    if kind == "missing":
        return " is not set, limit requests that have it"
    if kind == "value_error":
        sentence = str(error["ctx"]["error"])
        return sentence if sentence.startswith(("[", " ")) else f" {sentence}"
    if kind in ("too_long", "too_short"):
        bound = error["ctx"].get("max_length", f"at least {error['ctx'].get('min_length')}")
        return f" has {len(value)} entries, limit {bound}"
    return f" is {shown(value)}, limit {_limit(error)}"


def _limit(error: ErrorDetails) -> str:
    """In our words; a test sends every field every kind of value, so that none is left out."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "less_than_equal":
        return f"at most {context['le']}"
    if kind == "greater_than_equal":
        return f"at least {context['ge']}"
    if kind == "literal_error":
        return str(context["expected"])
    return _LIMITS.get(kind, "what the field is described to take")
