"""Frames that are written by hand are what protobuf writes and reads."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.protos.kv_transfer_pb2 import KvBeat, KvFrame, KvHello, KvRows
from legato.worker.handoff import frames
from legato.worker.handoff.frames import (
    MAX_PLAIN_BYTES,
    RowsFrame,
    RowsPrefix,
    header_checksum,
    read_frame,
)

HEADER = KvRows(
    sequence=77,
    epoch=2**63 + 5,
    attempt=3,
    layer_start=0,
    num_layers=30,
    token_start=129,
    num_tokens=64,
    kv_head_start=0,
    num_kv_heads=3,
)


def message_of(header: KvRows, data: bytes, crc: int) -> bytes:
    prefix = RowsPrefix.of(header, len(data))
    message = bytearray(prefix.num_bytes)
    message[len(prefix.head) :] = data
    prefix.write(memoryview(message), crc)
    return bytes(message)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 1 << 20, (1 << 21) + 3])
@pytest.mark.parametrize("crc", [0, 1, 0xFFFFFFFF])
def test_the_library_reads_what_is_written(size: int, crc: int) -> None:
    data = bytes(i * 7 % 256 for i in range(min(size, 999))).ljust(size, b"x")
    message = message_of(HEADER, data, crc)
    rows = KvFrame.FromString(message).rows
    assert (rows.data, rows.crc32c) == (data, crc)
    rows.ClearField("data")
    rows.ClearField("crc32c")
    assert rows == HEADER
    frame = read_frame(message)
    assert isinstance(frame, RowsFrame)
    assert frame.data == data
    assert frame.header.crc32c == crc
    assert (frame.header.epoch, frame.header.num_layers) == (HEADER.epoch, 30)


@pytest.mark.parametrize(
    "frame",
    [
        KvFrame(hello=KvHello(weights="float32")),
        KvFrame(beat=KvBeat()),
        KvFrame(rows=KvRows(epoch=5, slot=0)),
        KvFrame(rows=KvRows()),
        KvFrame(),
    ],
)
def test_other_frames_come_as_they_are(frame: KvFrame) -> None:
    assert read_frame(frame.SerializeToString()) == frame


def test_rows_that_the_library_has_written() -> None:
    rows = KvRows(epoch=7, layer_start=2, crc32c=9, data=b"abc")
    frame = read_frame(KvFrame(rows=rows).SerializeToString())
    assert isinstance(frame, RowsFrame)
    assert frame.data == b"abc"
    assert frame.header == KvRows(epoch=7, layer_start=2, crc32c=9)


def test_a_slot_before_the_rows_does_not_count() -> None:
    header = KvRows()
    header.CopyFrom(HEADER)
    header.slot = 3
    message = message_of(header, b"abc", 7)
    assert KvFrame.FromString(message).rows.WhichOneof("rows") == "data"
    frame = read_frame(message)
    assert isinstance(frame, RowsFrame)
    assert (frame.header.WhichOneof("rows"), frame.data) == (None, b"abc")


def test_fields_behind_the_rows() -> None:
    """Protobuf lets fields come in any order, and the last of a oneof counts."""
    first = message_of(HEADER, b"abc", 1)
    both = first + message_of(KvRows(epoch=8), b"defg", 2)
    frame = read_frame(both)
    merged = KvFrame.FromString(both).rows
    assert isinstance(frame, RowsFrame)
    assert frame.data == b"defg" == merged.data
    assert frame.header.epoch == 8
    late = KvRows(crc32c=1, data=b"abc").SerializeToString() + KvRows(epoch=9).SerializeToString()
    frame = read_frame(bytes([3 << 3 | 2, len(late)]) + late)
    assert isinstance(frame, RowsFrame)
    assert (frame.data, frame.header.epoch) == (b"abc", 9)
    switched = first + KvFrame(beat=KvBeat()).SerializeToString()
    assert read_frame(switched) == KvFrame(beat=KvBeat())


def field(number: int, content: bytes) -> bytes:
    """Of wire type 2, whatever its length."""
    size = len(content)
    length = bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


BIG = 4 << 20


@pytest.mark.parametrize(
    "message",
    [
        field(3, b"\x08\x01" * (BIG // 2)),
        field(3, (b"\x08" + b"\xff" * 9 + b"\x01") * (BIG // 11)),
        field(3, b"\xf8\x01\x01" * (BIG // 3)),  # fields that are not known
        field(3, b"\x52\x01a" * (BIG // 3)),  # data, again and again
        field(3, field(10, b"y" * BIG) + b"\x08\x01" * (BIG // 2)),  # many behind the data
        field(3, field(7, b"y" * BIG) + field(10, b"abc")),
        b"\x1a\x00" * (BIG // 2),  # rows, again and again
        message_of(HEADER, b"y" * BIG, 1) + field(1, b""),
        field(1, b"\x22\x00" * (BIG // 2)),  # hello
        field(2, field(1, b"\x22\x00" * (BIG // 2))),  # open
        b"\x2a\x00" * (BIG // 2),  # beats
    ],
    ids=range(11),
)
def test_large_messages_that_are_no_rows_are_hardly_looked_at(
    message: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library takes tens of milliseconds for them, and each step of Python counts."""

    class Library:
        @staticmethod
        def FromString(_: bytes) -> object:  # noqa: N802  # the library's name
            raise AssertionError("the library was asked")

    reads = 0
    read_varint = frames._read_varint

    def counted(message: bytes, at: int) -> tuple[int, int]:
        nonlocal reads
        reads += 1
        return read_varint(message, at)

    for name in ("KvFrame", "KvRows"):
        monkeypatch.setattr(frames, name, Library)
    monkeypatch.setattr(frames, "_read_varint", counted)
    with pytest.raises(DecodeError, match=f"{MAX_PLAIN_BYTES}"):
        read_frame(message)
    assert reads <= 100


def test_small_messages_of_many_fields_are_the_library_s() -> None:
    body = KvRows(epoch=5).SerializeToString() + b"\x10\x01" * 500 + field(10, b"abc")
    frame = read_frame(field(3, body))
    assert isinstance(frame, RowsFrame)
    assert (frame.data, frame.header) == (b"abc", KvRows(epoch=5, attempt=1))


def test_fields_behind_large_rows() -> None:
    body = (
        KvRows(crc32c=1, data=b"y" * BIG).SerializeToString() + KvRows(epoch=9).SerializeToString()
    )
    frame = read_frame(field(3, body))
    assert isinstance(frame, RowsFrame)
    assert (len(frame.data), frame.header) == (BIG, KvRows(crc32c=1, epoch=9))


@given(st.integers(0, 400), st.lists(st.tuples(st.integers(0, 399), st.integers(0, 255))))
@settings(max_examples=300, deadline=None)
def test_whatever_comes_is_a_frame_or_an_error(cut: int, changes: list[tuple[int, int]]) -> None:
    message = bytearray(message_of(HEADER, b"y" * 300, 77))
    for at, value in changes:
        if at < len(message):
            message[at] = value
    try:
        frame = read_frame(bytes(message[:cut]))
    except DecodeError:
        return
    try:
        theirs = KvFrame.FromString(bytes(message[:cut]))
    except DecodeError:
        # It cuts fields that the library would not: the checksum is there for what remains.
        return
    if isinstance(frame, RowsFrame):
        assert theirs.rows.data == frame.data
    else:
        assert theirs == frame


@pytest.mark.parametrize(
    "field",
    [
        f.name
        for f in KvRows.DESCRIPTOR.fields
        if f.name not in ("crc32c", "header_crc32c", "data", "slot")
    ],
)
def test_the_checksum_covers_every_field(field: str) -> None:
    other = KvRows()
    other.CopyFrom(HEADER)
    setattr(other, field, getattr(other, field) ^ 1)
    assert header_checksum(other) != header_checksum(HEADER)
