"""Frames of a Link as bytes: valid protobuf, while the rows never pass through its library."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import google_crc32c
from google.protobuf.message import DecodeError

from legato.protos.kv_transfer_pb2 import KvFrame, KvRows

# Field number and wire type, as protobuf writes them: all are one byte.
_FRAME_ROWS = bytes([3 << 3 | 2])
_ROWS_CRC32C = bytes([9 << 3 | 5])
_ROWS_DATA = bytes([10 << 3 | 2])
_CRC_BYTES = 4
# What a message may have besides rows: far more than any frame needs, and so little that protobuf's
# library is through with any such bytes within a millisecond.
MAX_PLAIN_BYTES = 64 << 10
# Fields of a rows frame that are walked over one by one; the message has 12.
_MAX_FIELDS = 32
# sequence, epoch, attempt, layers, tokens, KV heads.
_CHECKED = struct.Struct("<IQ7i")


def header_checksum(header: KvRows) -> int:
    """`header_crc32c` of the other fields. To be extended over the rows' bytes: `crc32c`."""
    fields = _CHECKED.pack(
        header.sequence,
        header.epoch,
        header.attempt,
        header.layer_start,
        header.num_layers,
        header.token_start,
        header.num_tokens,
        header.kv_head_start,
        header.num_kv_heads,
    )
    return int(google_crc32c.value(fields))


@dataclass(frozen=True)
class RowsFrame:
    """A KvFrame with `rows` whose bytes are beside it."""

    header: KvRows  # without `data`
    data: memoryview


@dataclass(frozen=True)
class RowsPrefix:
    """What comes before the rows' bytes in the message; the checksum is put in when it is known."""

    head: bytes
    num_bytes: int  # of the whole message, the rows included
    _crc_at: int

    @classmethod
    def of(cls, header: KvRows, num_data_bytes: int) -> RowsPrefix:
        """`header` has neither `crc32c` nor rows."""
        fields = header.SerializeToString()
        data = _ROWS_DATA + _varint(num_data_bytes)
        size = len(fields) + len(_ROWS_CRC32C) + _CRC_BYTES + len(data) + num_data_bytes
        start = _FRAME_ROWS + _varint(size) + fields + _ROWS_CRC32C
        head = start + bytes(_CRC_BYTES) + data
        return cls(head, len(head) + num_data_bytes, len(start))

    def write(self, message: memoryview, crc32c: int) -> None:
        """Writes it to the beginning of the message; the rows lie at `message[len(head):]`."""
        message[: len(self.head)] = self.head
        message[self._crc_at : self._crc_at + _CRC_BYTES] = crc32c.to_bytes(_CRC_BYTES, "little")


def read_frame(message: bytes) -> KvFrame | RowsFrame:
    """Any frame; one with `data` in it comes as RowsFrame, whoever has encoded it.

    The work does not grow with what is in the message: one of more than MAX_PLAIN_BYTES is a rows
    frame with few fields besides `data`, or is refused before the library has seen it.

    Raises:
        DecodeError: it is none.
    """
    rows = _walk(message)
    if rows is None:
        if len(message) > MAX_PLAIN_BYTES:
            raise DecodeError(f"only rows may have more than {MAX_PLAIN_BYTES} bytes")
        return _from_library(KvFrame.FromString(message))
    if len(message) - rows.num_data_bytes > MAX_PLAIN_BYTES:
        raise DecodeError(
            f"rows: {len(message) - rows.num_data_bytes} bytes besides data, "
            f"limit {MAX_PLAIN_BYTES}"
        )
    if not rows.data_is_last:
        return _from_library(KvFrame.FromString(message))
    header = KvRows.FromString(message[rows.start : rows.data_tag_at])
    header.ClearField("slot")  # of the two the last one counts
    return RowsFrame(header, memoryview(message)[rows.data_at :])


@dataclass(frozen=True)
class _Walked:
    """Where the parts of a rows frame are."""

    start: int  # of the fields of KvRows
    data_tag_at: int
    data_at: int
    num_data_bytes: int
    data_is_last: bool  # nothing comes behind it


def _walk(message: bytes) -> _Walked | None:
    """None: it is not one field `rows` with one field `data` in it, or has many fields."""
    if message[:1] != _FRAME_ROWS:
        return None
    size, start = _read_varint(message, 1)
    if start + size != len(message):  # further frames, or fields that are not known here
        return None
    at = start
    found: tuple[int, int, int] | None = None
    for _ in range(_MAX_FIELDS):
        if at >= len(message):
            break
        if message[at : at + 1] == _ROWS_DATA:
            if found is not None:
                return None
            num_bytes, data_at = _read_varint(message, at + 1)
            found = at, data_at, num_bytes
            at = data_at + num_bytes
        else:
            at = _skip_field(message, at)
    if found is None or at < len(message):
        return None
    if at > len(message):
        raise DecodeError("a field is cut off")
    tag_at, data_at, num_bytes = found
    return _Walked(start, tag_at, data_at, num_bytes, data_at + num_bytes == len(message))


def _from_library(frame: KvFrame) -> KvFrame | RowsFrame:
    if frame.WhichOneof("frame") != "rows" or not frame.rows.HasField("data"):
        return frame
    data = memoryview(frame.rows.data)
    frame.rows.ClearField("data")
    return RowsFrame(frame.rows, data)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """The value and where the next field begins."""
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
    raise DecodeError("a number has no end")


def _skip_field(message: bytes, at: int) -> int:
    tag, at = _read_varint(message, at)
    match tag & 7:
        case 0:
            return _read_varint(message, at)[1]
        case 1:
            return at + 8
        case 2:
            size, at = _read_varint(message, at)
            return at + size
        case 5:
            return at + 4
    raise DecodeError(f"wire type {tag & 7} is not used here")
