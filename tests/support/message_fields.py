"""What is in the messages that come in over the wire, read from their descriptors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from google.protobuf.descriptor import Descriptor, FieldDescriptor

MAX_DEPTH = 16


def inputs(files: Sequence[Any]) -> dict[str, Descriptor]:
    """By method, as Service/Method: the type of what is sent to it."""
    return {
        f"{service.name}/{method.name}": method.input_type
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }


def fields(
    message: Descriptor, path: str = "", depth: int = 0
) -> Iterator[tuple[str, FieldDescriptor]]:
    """Each field of the message and of all within it, with its path."""
    assert depth < MAX_DEPTH, f"{path} nests without an end: it needs a limit of depth"
    for field in message.fields:
        name = f"{path}.{field.name}" if path else field.name
        yield name, field
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.message_type is not None and not is_map:
            yield from fields(field.message_type, name, depth + 1)


def grows(field: FieldDescriptor) -> bool:
    """Whether a sender may make it as large as he likes."""
    return field.is_repeated or field.type in (field.TYPE_STRING, field.TYPE_BYTES)
