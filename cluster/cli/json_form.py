"""json_dict: a message of the wire as the JSON that commands print: every number is a number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.json_format import MessageToDict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message


def json_dict(message: Message) -> dict[str, Any]:
    """By the names of its fields; those without presence are there with their defaults.

    protobuf's own form has 64-bit integers as strings, since JavaScript would round those above
    2^53, and three words for the numbers that JSON does not have. Here the first are integers, as
    those of 32 bits are, and the second null.
    """
    told: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    # protobuf's two kinds of descriptors, in C and in Python, are of one form.
    _mend(told, cast("Iterable[FieldDescriptor]", message.DESCRIPTOR.fields))
    return told


def _mend(told: dict[str, Any], fields: Iterable[FieldDescriptor]) -> None:
    for field in fields:
        if field.name not in told:
            continue
        value = told[field.name]
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            values = kind.fields_by_name["value"]
            told[field.name] = {key: _mended(item, values) for key, item in value.items()}
        elif isinstance(value, list):
            told[field.name] = [_mended(item, field) for item in value]
        else:
            told[field.name] = _mended(value, field)


def _mended(value: Any, field: FieldDescriptor) -> Any:  # noqa: ANN401  # whatever JSON has
    if field.message_type is not None:
        _mend(value, field.message_type.fields)
    elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
        return int(value)
    elif field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
        return float(value) if math.isfinite(float(value)) else None
    return value
