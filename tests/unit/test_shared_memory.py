"""Memory of another process is read only where it is proven to be what was described."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from legato.protos.kv_transfer_pb2 import KvMemory
from legato.worker.handoff.shared_memory import (
    MAX_MEMORY_BYTES,
    SLOTS_OFFSET,
    TOKEN_BYTES,
    MemoryRefusedError,
    ReceiverMemory,
    SenderMemory,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def no_leak() -> Iterator[None]:
    before = num_descriptors()
    yield
    assert num_descriptors() == before


def changed(description: KvMemory, **fields: object) -> KvMemory:
    copy = KvMemory()
    copy.CopyFrom(description)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


def test_what_one_writes_the_other_reads_and_cannot_write() -> None:
    with no_leak():
        sender = SenderMemory.create(3, 1000)
        receiver = ReceiverMemory.open(sender.description)
        for index in range(3):
            assert len(sender.slot(index)) == 1000
            sender.slot(index)[:] = bytes([index + 1]) * 1000
        for index in range(3):
            assert receiver.slot(index, 1000) == bytes([index + 1]) * 1000
            assert receiver.slot(index, 7) == bytes([index + 1]) * 7
        with pytest.raises(TypeError, match="read-only"):
            receiver.slot(0, 1)[0] = 0
        receiver.close()
        sender.close()
        sender.close()
        receiver.close()


def test_another_process_reads_it() -> None:
    sender = SenderMemory.create(2, 64)
    sender.slot(1)[:5] = b"hello"
    code = (
        "import sys; from legato.protos.kv_transfer_pb2 import KvMemory;"
        "from legato.worker.handoff.shared_memory import ReceiverMemory;"
        "m = ReceiverMemory.open(KvMemory.FromString(bytes.fromhex(sys.argv[1])));"
        "print(bytes(m.slot(1, 5)).decode())"
    )
    described = sender.description.SerializeToString().hex()
    out = subprocess.run(
        [sys.executable, "-c", code, described], capture_output=True, text=True, check=True
    )
    assert out.stdout == "hello\n"
    sender.close()


def test_slots_that_are_not_there_are_refused() -> None:
    sender = SenderMemory.create(2, 100)
    receiver = ReceiverMemory.open(sender.description)
    for index, size in ((2, 1), (-1, 1), (2**31 - 1, 1), (0, 101), (1, 2**62), (0, -1)):
        with pytest.raises(ValueError, match=r"slot is|exceed"):
            receiver.slot(index, size)
    receiver.close()
    sender.close()


def test_a_slot_in_use_outlives_both_ends() -> None:
    sender = SenderMemory.create(1, 10)
    sender.slot(0)[:] = b"0123456789"
    receiver = ReceiverMemory.open(sender.description)
    kept = receiver.slot(0, 10)
    receiver.close()
    sender.close()
    assert kept == b"0123456789"


def test_it_is_gone_with_its_sender() -> None:
    sender = SenderMemory.create(1, 10)
    sender.close()
    with no_leak(), pytest.raises(MemoryRefusedError, match="No such file"):
        ReceiverMemory.open(sender.description)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"pid": 0}, "pid"),
        ({"pid": -1}, "pid"),
        ({"pid": 2**62}, "No such file"),
        ({"fd": -1}, "fd"),
        ({"fd": 2**31 - 1}, "No such file"),
        ({"token": b""}, "token has 0 bytes"),
        ({"token": b"x" * TOKEN_BYTES}, "does not begin with the token"),
        ({"token": b"x" * (TOKEN_BYTES + 1)}, "token has"),
        ({"slots_offset": 0}, "slots_offset"),
        ({"slots_offset": -(2**62)}, "slots_offset"),
        ({"slots_offset": 2**62}, "limit"),
        ({"slots_offset": SLOTS_OFFSET + 1}, "described are"),
        ({"slot_bytes": 0}, "slot_bytes"),
        ({"slot_bytes": 101}, "described are"),
        ({"slot_bytes": 2**62}, "limit"),
        ({"num_slots": 0}, "num_slots"),
        ({"num_slots": 3}, "described are"),
        ({"num_slots": 2**31 - 1}, "limit"),
        ({"num_slots": 2**31 - 1, "slot_bytes": 2**62}, "limit"),
    ],
)
def test_a_wrong_description_is_refused(fields: dict[str, object], named: str) -> None:
    sender = SenderMemory.create(2, 100)
    with no_leak(), pytest.raises(MemoryRefusedError, match=named):
        ReceiverMemory.open(changed(sender.description, **fields))
    sender.close()


def memory_file(name: str, size: int, token: bytes, seals: int) -> int:
    file = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    os.pwrite(file, token, 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


@pytest.mark.parametrize("kind", ["name", "unsealed", "short"])
def test_memory_that_is_not_as_ours_is_refused(kind: str) -> None:
    token, size = b"t" * TOKEN_BYTES, SLOTS_OFFSET + 100
    file = memory_file(
        "other" if kind == "name" else "legato-kv",
        size - 1 if kind == "short" else size,
        token,
        fcntl.F_SEAL_GROW if kind == "unsealed" else fcntl.F_SEAL_SHRINK,
    )
    described = KvMemory(
        pid=os.getpid(),
        fd=file,
        token=token,
        slots_offset=SLOTS_OFFSET,
        slot_bytes=100,
        num_slots=1,
    )
    reason = {"name": "no memory of ours", "unsealed": "smaller", "short": "described are"}[kind]
    with no_leak(), pytest.raises(MemoryRefusedError, match=reason):
        ReceiverMemory.open(described)
    os.close(file)


def test_nothing_but_such_memory_is_opened(tmp_path: Path) -> None:
    token = b"t" * TOKEN_BYTES
    regular = tmp_path / "memfd:legato-kv (deleted)"
    regular.write_bytes(token + bytes(2 * SLOTS_OFFSET))
    os.mkfifo(tmp_path / "fifo")
    pipe = os.pipe()
    sockets = socket.socketpair()
    files = {
        "file": os.open(regular, os.O_RDONLY),
        "folder": os.open(tmp_path, os.O_RDONLY),
        "fifo": os.open(tmp_path / "fifo", os.O_RDWR),  # whose opening to read would block
        "pipe": pipe[0],
        "socket": sockets[0].fileno(),
        "device": os.open("/dev/zero", os.O_RDONLY),
        "event": os.eventfd(0),
    }
    for name, file in files.items():
        described = KvMemory(
            pid=os.getpid(),
            fd=file,
            token=token,
            slots_offset=SLOTS_OFFSET,
            slot_bytes=100,
            num_slots=1,
        )
        with no_leak(), pytest.raises(MemoryRefusedError, match="no memory of ours"):
            ReceiverMemory.open(described)
        if name != "socket":
            os.close(file)
    os.close(pipe[1])
    for each in sockets:
        each.close()


def test_a_sender_cannot_shrink_what_a_receiver_reads() -> None:
    sender = SenderMemory.create(1, 3 * mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(sender.description.fd, 1)
    with pytest.raises(PermissionError):
        os.ftruncate(sender.description.fd, 1 << 20)
    sender.close()


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (-1, 5)])
def test_no_slots_are_the_callers_fault(numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="limit 1"):
        SenderMemory.create(*numbers)


@pytest.mark.parametrize("numbers", [(1, MAX_MEMORY_BYTES), (1 << 40, 1 << 40)])
def test_more_than_a_receiver_maps_is_not_made(numbers: tuple[int, int]) -> None:
    with no_leak(), pytest.raises(MemoryRefusedError, match="limit"):
        SenderMemory.create(*numbers)
