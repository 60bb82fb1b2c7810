"""RequestFuzz: GenerateRequests that nobody should send, made from the message's own descriptor."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.message import Message

METHOD = "/legato.v1.Generation/Generate"
INT32 = (0, -1, 1, 2, 3, 5, 7, 64, 65, 127, 128, 129, 255, 319, 320, 1000, 2**31 - 1, -(2**31))
INT64 = (*INT32, 2**63 - 1, -(2**63), 2**32)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 2.1, -2.1, 100.0, 100.5, 1e-45, 3e38, math.nan, math.inf,
          -math.inf)  # fmt: skip
TEXTS = ("", " ", "a", "hello", "\x00", "\ud7ff", "\U0010ffff", "é" * 3, "👩‍👩‍👧", "<|im_end|>",
         "<s>", "</s>", "{{7*7}}", "{% for x in range(10**9) %}", "%s%n", "../../etc/passwd",
         "cos\nsystem\n(S'true'\ntR.", '{"a":' * 50, "[" * 200, "\u202e", "user", "system",
         "assistant", "tool")  # fmt: skip
COUNTS = (0, *(1, 2, 3) * 10, *(16, 17, 64, 65, 129) * 2, 1025, 5000)
MOST_FIELDS = 40_000  # of one message, so that a deep one stays a message
# What a request may end with. Any other is a fault of ours.
FAIR = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,  # a field that this release does not know, by its number
    grpc.StatusCode.FAILED_PRECONDITION,  # another model's fingerprint
    grpc.StatusCode.RESOURCE_EXHAUSTED,  # valid, and more than there is room for
    grpc.StatusCode.ALREADY_EXISTS,  # two at once of one id
    grpc.StatusCode.ABORTED,  # and one that goes on with the other
}


class RequestFuzz:
    """The same requests for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._left = 0

    def next(self) -> bytes:
        """On the wire."""
        draw = self._random.random()
        self._left = MOST_FIELDS
        if draw < 0.1:
            message = generation_pb2.GenerateRequest()
            self._fill(message, 0.5)
        else:
            message = self._valid()
            for _ in range(self._random.choice((1, 1, 1, 2, 3, 5))):
                self._change(message)
        data = message.SerializeToString()
        if draw > 0.75:
            data = self._damaged(data)
        return data

    def _valid(self) -> generation_pb2.GenerateRequest:
        sampling = common_pb2.SamplingParams(max_tokens=self._random.choice((1, 2, 3, 8)))
        message = generation_pb2.GenerateRequest(sampling=sampling)
        kind = self._random.randrange(3)
        if kind == 0:
            message.text = "hello"
        elif kind == 1:
            message.token_ids.ids.extend((1, 2, 3))
        else:
            message.messages.messages.add(role="user", content="hello")
        return message

    def _change(self, message: Message) -> None:
        """One field of it, or of a message within it."""
        field = self._random.choice(message.DESCRIPTOR.fields)
        inner = field.message_type is not None and not _is_map(field) and not field.is_repeated
        if inner and self._random.random() < 0.8:
            part = getattr(message, field.name)
            part.SetInParent()
            self._change(part)
        elif self._random.random() < 0.1:
            message.ClearField(field.name)
        else:
            self._set(message, field, 0.3)

    def _fill(self, message: Message, density: float) -> None:
        for each in message.DESCRIPTOR.fields:
            if self._random.random() < density:
                self._set(message, each, density / 2)

    def _set(self, message: Message, field: FieldDescriptor, density: float) -> None:
        value = getattr(message, field.name)
        if _is_map(field):
            entry = field.message_type
            assert entry is not None
            for _ in range(self._count()):
                key = self._scalar(entry.fields_by_name["key"])
                value[key] = self._scalar(entry.fields_by_name["value"])
        elif field.is_repeated:
            for _ in range(self._count()):
                if field.message_type is not None:
                    self._fill(value.add(), density)
                else:
                    value.append(self._scalar(field))
        elif field.message_type is not None:
            value.SetInParent()
            self._fill(value, density)
        else:
            setattr(message, field.name, self._scalar(field))

    def _count(self) -> int:
        count = min(self._random.choice(COUNTS), self._left)
        self._left -= count
        return count

    def _scalar(self, field: FieldDescriptor) -> Any:  # noqa: ANN401  # of the field's type
        pick = self._random.choice
        match field.type:
            case field.TYPE_STRING:
                text = pick(TEXTS)
                return text * pick((1, 1, 1, 2, 50, 1000)) if len(text) < 50 else text
            case field.TYPE_BYTES:
                return self._random.randbytes(pick((0, 1, 7, 1000)))
            case field.TYPE_BOOL:
                return pick((False, True))
            case field.TYPE_FLOAT | field.TYPE_DOUBLE:
                return pick((*FLOATS, self._random.uniform(-3, 3)))
            case field.TYPE_ENUM:
                return pick((0, 1, 2, 3, 99, -1))
            case field.TYPE_INT64 | field.TYPE_SINT64:
                return pick((*INT64, self._random.randrange(-(2**63), 2**63)))
            case field.TYPE_INT32 | field.TYPE_SINT32:
                return pick((*INT32, self._random.randrange(-(2**31), 2**31)))
        return abs(pick(INT32))

    def _damaged(self, data: bytes) -> bytes:
        out = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 8))):
            at = self._random.randrange(len(out) + 1)
            kind = self._random.randrange(6)
            if kind == 0 and at < len(out):
                out[at] ^= 1 << self._random.randrange(8)
            elif kind == 1:
                del out[at:]
            elif kind == 2:
                out[at:at] = self._random.randbytes(self._random.choice((1, 4, 100)))
            elif kind == 3:
                out += out[at : at + 200]
            elif kind == 4:  # a field of a number and a wire type that nobody has
                out += bytes((self._random.randrange(256), self._random.randrange(256)))
            else:  # messages within messages within messages
                out += b"\x52" + bytes((120,)) + b"\x0a\x76" * 60
        return bytes(out)


def _is_map(field: FieldDescriptor) -> bool:
    inner: Descriptor | None = field.message_type
    return inner is not None and inner.GetOptions().map_entry


@dataclass
class Tally:
    """How the requests of a run ended."""

    codes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def note(self, code: grpc.StatusCode, details: str, data: bytes) -> None:
        """Remembers what must not be, with the request."""
        self.codes[code.name] += 1
        is_told = code is grpc.StatusCode.OK or 0 < len(details) <= 2000
        if (code not in FAIR or not is_told) and len(self.faults) < 20:
            self.faults.append(f"{code.name} {details[:300]!r} of {data[:400]!r}")


async def fuzz(
    channel: grpc.aio.Channel,
    seed: int,
    num_requests: int,
    *,
    num_at_once: int = 16,
    after: Callable[[int], None] = lambda num_done: None,
) -> Tally:
    """Sends them, so many at once; `after` is told how many have ended."""
    source, tally = RequestFuzz(seed), Tally()
    requests = (source.next() for _ in range(num_requests))
    call = channel.unary_stream(METHOD)

    async def send() -> None:
        for data in requests:
            stream = call(data, timeout=30)
            with suppress(grpc.aio.AioRpcError):
                while await stream.read() is not grpc.aio.EOF:
                    pass
            tally.note(await stream.code(), await stream.details() or "", data)
            after(tally.codes.total())

    await asyncio.gather(*(send() for _ in range(num_at_once)))
    return tally
