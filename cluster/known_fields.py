"""Refuses what a newer client set and this release does not know: nothing is ignored in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from google.protobuf.unknown_fields import UnknownFieldSet

from legato.cluster.errors import RequestError

if TYPE_CHECKING:
    from google.protobuf.message import Message

MAX_DEPTH = 8  # our messages nest three deep


def check_known_fields(message: Message, path: str = "", depth: int = 0) -> None:
    """Looks at the message and all messages within.

    Raises:
        RequestError: UNIMPLEMENTED naming the message and the field's number.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        where = path or message.DESCRIPTOR.name
        raise RequestError(
            grpc.StatusCode.UNIMPLEMENTED,
            f"{where} has field number {unknown[0].field_number}, which this release does not know",
        )
    if depth >= MAX_DEPTH:
        return
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        name = f"{path}.{field.name}" if path else field.name
        if field.is_repeated:
            for index, item in enumerate(value):
                check_known_fields(item, f"{name}[{index}]", depth + 1)
        else:
            check_known_fields(value, name, depth + 1)
