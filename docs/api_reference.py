"""Writes docs/api-reference.md from the protos of the public services: `make protos` runs it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.descriptor_pb2 import (
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor_pb2 import (
        DescriptorProto,
        EnumDescriptorProto,
        ServiceDescriptorProto,
    )

ROOT = Path(__file__).parents[1]
PUBLIC = ("generation", "cluster", "common")  # in this order
PACKAGE = ".legato.v1."
# Numbers of fields in descriptor.proto: they make up the paths of comments.
SERVICE, METHOD, MESSAGE, FIELD, ENUM, VALUE, ONEOF = 6, 2, 4, 2, 5, 2, 8
HEAD = """# API reference

Made from the protos by `make protos`: what is wrong here is wrong there. [api.md](api.md) is the
overview. Package `legato.v1`. `optional` fields tell a zero from "not set".
"""


class Comments:
    """Of one file, by path."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._by_path = {
            tuple(place.path): place.leading_comments for place in file.source_code_info.location
        }

    def of(self, *path: int) -> str:
        """As one paragraph a block; lines that begin with a space are joined."""
        lines = [line.strip() for line in self._by_path.get(path, "").strip().split("\n")]
        return "\n".join(lines).replace("\n\n", "\0").replace("\n", " ").replace("\0", "\n\n")


def cell(text: str) -> str:
    """For a table."""
    return text.replace("<", "&lt;").replace("\n\n", "<br>").replace("|", "\\|")


def linked(type_name: str) -> str:
    """A message or enum of ours."""
    name = type_name.removeprefix(PACKAGE)
    return f"[{name}](#{name.lower()})"


def type_of(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """As a reader of protos says it."""
    if field.type_name:
        name = field.type_name.rpartition(".")[2]
        for nested in message.nested_type:
            if nested.name == name and nested.options.map_entry:
                key, value = (FieldDescriptorProto.Type.Name(f.type) for f in nested.field)
                return f"map<{short(key)}, {short(value)}>"
        named = linked(field.type_name)
    else:
        named = short(FieldDescriptorProto.Type.Name(field.type))
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {named}"
    return f"optional {named}" if field.proto3_optional else named


def short(name: str) -> str:
    """TYPE_INT32 is int32."""
    return name.removeprefix("TYPE_").lower()


def service_lines(service: ServiceDescriptorProto, place: int, comments: Comments) -> Iterator[str]:
    """Its methods."""
    yield f"## {service.name}\n"
    yield f"{comments.of(SERVICE, place)}\n"
    for number, method in enumerate(service.method):
        answer = linked(method.output_type)
        answer = f"a stream of {answer}" if method.server_streaming else answer
        yield f"### {service.name}.{method.name}\n"
        yield f"{linked(method.input_type)} → {answer}\n"
        yield f"{comments.of(SERVICE, place, METHOD, number)}\n"


def message_lines(message: DescriptorProto, place: int, comments: Comments) -> Iterator[str]:
    """Its fields."""
    yield f"### {message.name}\n"
    yield f"{comments.of(MESSAGE, place)}\n"
    if not message.field:
        return
    yield "| field | type | no. | |"
    yield "|---|---|---|---|"
    for number, field in enumerate(message.field):
        text = comments.of(MESSAGE, place, FIELD, number)
        if field.HasField("oneof_index") and not field.proto3_optional:
            oneof = message.oneof_decl[field.oneof_index].name
            about = comments.of(MESSAGE, place, ONEOF, field.oneof_index)
            text = " ".join(part for part in (f"One of `{oneof}`.", about, text) if part)
        kind = cell(type_of(field, message))
        yield f"| `{field.name}` | {kind} | {field.number} | {cell(text)} |"
    yield ""


def enum_lines(enum: EnumDescriptorProto, place: int, comments: Comments) -> Iterator[str]:
    """Its values."""
    yield f"### {enum.name}\n"
    yield f"{comments.of(ENUM, place)}\n"
    yield "| value | no. | |"
    yield "|---|---|---|"
    for number, value in enumerate(enum.value):
        text = comments.of(ENUM, place, VALUE, number)
        yield f"| `{value.name}` | {value.number} | {cell(text)} |"
    yield ""


def described(protos: Path) -> list[FileDescriptorProto]:
    """The public files, with their comments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        names = [f"legato/protos/{name}.proto" for name in PUBLIC]
        status = protoc.main(
            ["", f"-Ilegato/protos={protos}", "--include_source_info",
             f"--descriptor_set_out={out}", *names]
        )  # fmt: skip
        if status != 0:
            raise ValueError(f"{protos}: protoc refuses the protos")
        files = {file.name: file for file in FileDescriptorSet.FromString(out.read_bytes()).file}
        return [files[name] for name in names]


def reference(protos: Path) -> str:
    """The whole page."""
    services: list[str] = []
    messages: list[str] = []
    for file in described(protos):
        comments = Comments(file)
        for place, service in enumerate(file.service):
            services += service_lines(service, place, comments)
        messages.append(f"## {Path(file.name).name}\n")
        for place, message in enumerate(file.message_type):
            messages += message_lines(message, place, comments)
        for place, enum in enumerate(file.enum_type):
            messages += enum_lines(enum, place, comments)
    return "\n".join([HEAD, *services, *messages]).rstrip() + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(ROOT / "protos"))
