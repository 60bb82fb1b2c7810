"""SenderMemory and ReceiverMemory: slots for rows in memory that two workers of one host share."""

from __future__ import annotations

import hmac
import mmap
import os
import re
import secrets
import stat
import sys
from contextlib import suppress

from legato.protos.kv_transfer_pb2 import KvMemory

if sys.platform == "linux":
    import fcntl

# What the memory begins with: who can say it has seen the sender's Hello.
TOKEN_BYTES = 32
# The slots begin on a page of their own.
SLOTS_OFFSET = 4096
# A sender with a window of a few MiB needs no more; a receiver maps no more.
MAX_MEMORY_BYTES = 64 << 20
_NAME = "legato-kv"
_SHOWN_AS = re.compile(rf"/memfd:{_NAME} \(deleted\)")


class MemoryRefusedError(OSError):
    """The memory cannot be had, or is not to be trusted; the message says why."""


class SenderMemory:
    """Slots that this worker writes and a receiver on the same host reads, in a file that has no
    name: it goes with the last process that has it open. Its size is sealed.
    """

    def __init__(self, file: int, memory: mmap.mmap, description: KvMemory) -> None:
        """See `create`."""
        self.description = description
        self._file = file
        self._map = memory
        self._view = memoryview(memory)

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int) -> SenderMemory:
        """All of it is taken at once.

        Raises:
            MemoryRefusedError: this machine has none to give, or it would be more than
                MAX_MEMORY_BYTES.
            ValueError: a number is below 1.
        """
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(f"num_slots and slot_bytes are {num_slots}, {slot_bytes}, limit 1")
        size = SLOTS_OFFSET + num_slots * slot_bytes
        if size > MAX_MEMORY_BYTES:
            raise MemoryRefusedError(
                f"{num_slots} slots of {slot_bytes} bytes are {size} bytes in all, "
                f"limit {MAX_MEMORY_BYTES}"
            )
        if sys.platform != "linux":
            raise MemoryRefusedError(f"shared memory needs Linux, this is {sys.platform}")
        token = secrets.token_bytes(TOKEN_BYTES)
        try:
            file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise MemoryRefusedError(f"memfd_create: {error.strerror}") from None
        try:
            # Without a touch: what no row has needed is not cleared (7 ms of 32 MiB, not 21).
            os.posix_fallocate(file, 0, size)
            # Nobody can make a receiver read beyond its end, which would kill it.
            fcntl.fcntl(
                file,
                fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
            )
            memory = mmap.mmap(file, size, flags=mmap.MAP_SHARED)
        except OSError as error:
            os.close(file)
            raise MemoryRefusedError(f"{size} bytes of shared memory: {error.strerror}") from None
        memory[:TOKEN_BYTES] = token
        description = KvMemory(
            pid=os.getpid(),
            fd=file,
            token=token,
            slots_offset=SLOTS_OFFSET,
            slot_bytes=slot_bytes,
            num_slots=num_slots,
        )
        return cls(file, memory, description)

    def slot(self, index: int) -> memoryview:
        """All `slot_bytes` of it, to be written."""
        size = self.description.slot_bytes
        assert 0 <= index < self.description.num_slots, f"slot {index} does not exist"
        start = SLOTS_OFFSET + index * size
        return self._view[start : start + size]

    def close(self) -> None:
        """No receiver can open it from now on. Idempotent."""
        if self._file < 0:
            return
        os.close(self._file)
        self._file = -1
        _unmap(self._view, self._map)


class ReceiverMemory:
    """Another worker's slots, to be read only.

    What a description says is not believed: only a file of ours is opened, whose size can never
    change again and which begins with the token. Its bytes may change at any time.
    """

    def __init__(self, memory: mmap.mmap, description: KvMemory) -> None:
        """See `open`."""
        self._map = memory
        self._view = memoryview(memory)
        self._offset = description.slots_offset
        self._slot_bytes = description.slot_bytes
        self._num_slots = description.num_slots

    @classmethod
    def open(cls, description: KvMemory) -> ReceiverMemory:
        """Maps what `description` names.

        Raises:
            MemoryRefusedError: it is not there, is on another host, or is not what it must be.
        """
        if sys.platform != "linux":
            raise MemoryRefusedError(f"shared memory needs Linux, this is {sys.platform}")
        _check_numbers(description)
        path = f"/proc/{description.pid}/fd/{description.fd}"
        try:
            # Named, and not opened yet: to open a pipe may block, to open a device may do anything.
            named = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise MemoryRefusedError(f"{path}: {error.strerror}") from None
        try:
            memory = _map(path, named, description)
        except MemoryRefusedError:
            raise
        except OSError as error:
            raise MemoryRefusedError(f"{path}: {error.strerror}") from None
        finally:
            os.close(named)
        if not hmac.compare_digest(memory[:TOKEN_BYTES], description.token):
            memory.close()
            raise MemoryRefusedError(f"{path} does not begin with the token")
        return cls(memory, description)

    def slot(self, index: int, num_bytes: int) -> memoryview:
        """Its first bytes, read-only.

        Raises:
            ValueError: there is no such slot, or it is smaller.
        """
        if not 0 <= index < self._num_slots:
            raise ValueError(f"slot is {index}, limit [0, {self._num_slots})")
        if not 0 <= num_bytes <= self._slot_bytes:
            raise ValueError(f"{num_bytes} bytes exceed the slot's {self._slot_bytes}")
        start = self._offset + index * self._slot_bytes
        return self._view[start : start + num_bytes]

    def close(self) -> None:
        """Gives the mapping back, or leaves it to the last slot that is in use. Idempotent."""
        _unmap(self._view, self._map)


def _check_numbers(description: KvMemory) -> None:
    if len(description.token) != TOKEN_BYTES:
        raise MemoryRefusedError(f"token has {len(description.token)} bytes, not {TOKEN_BYTES}")
    for name, least in (
        ("pid", 1),
        ("fd", 0),
        ("slots_offset", TOKEN_BYTES),
        ("slot_bytes", 1),
        ("num_slots", 1),
    ):
        value = getattr(description, name)
        if value < least:
            raise MemoryRefusedError(f"{name} is {value}, at least {least} is expected")
    size = _size_of(description)
    if size > MAX_MEMORY_BYTES:
        raise MemoryRefusedError(f"it has {size} bytes in all, limit {MAX_MEMORY_BYTES}")


def _size_of(description: KvMemory) -> int:
    return int(description.slots_offset + description.num_slots * description.slot_bytes)


if sys.platform == "linux":

    def _map(path: str, named: int, description: KvMemory) -> mmap.mmap:
        """What the descriptor `named` names, if it is a SenderMemory of the size described."""
        shown_as = os.readlink(f"/proc/self/fd/{named}")
        status = os.fstat(named)
        if not _SHOWN_AS.fullmatch(shown_as) or not stat.S_ISREG(status.st_mode):
            raise MemoryRefusedError(f"{path} is no memory of ours")
        if status.st_nlink != 0:  # a file of that name in some folder
            raise MemoryRefusedError(f"{path} is no memory of ours, it has a name")
        size = _size_of(description)
        # The very file that was looked at, whatever has become of the path.
        file = os.open(f"/proc/self/fd/{named}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise MemoryRefusedError(f"{path} may be made smaller")
            actual = os.fstat(file).st_size
            if actual < size:
                raise MemoryRefusedError(f"{path} has {actual} bytes, described are {size}")
            return mmap.mmap(file, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(file)


def release(view: memoryview) -> None:
    """Nobody looks at it any more, whoever has a reference to it still."""
    with suppress(BufferError):  # but for an array that was made of it: then it goes with that
        view.release()


def _unmap(view: memoryview, memory: mmap.mmap) -> None:
    release(view)
    with suppress(BufferError):  # some slot is in use: it goes with it
        memory.close()
