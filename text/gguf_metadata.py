"""GGUF metadata: the key-value head of a .gguf file, read with every count checked first."""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING, TypeAlias

from legato.protos.printable import printable, shown

if TYPE_CHECKING:
    from pathlib import Path

GgufValue: TypeAlias = "int | float | bool | str | list[GgufValue]"

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)  # version 1 had 32-bit lengths; nobody writes it any more
# Far above any real model, so that a damaged count cannot cost minutes or gigabytes in a big file.
MAX_KEYS = 1 << 16
MAX_ARRAY_ITEMS = 1 << 22
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_DEPTH = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def read_gguf_metadata(path: Path) -> dict[str, GgufValue]:
    """All keys of the file's head. No tensor is touched: 50 ms for a vocabulary of 49,152.

    Raises:
        ValueError: naming the file, for anything that is not a whole GGUF head.
    """
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ValueError(f"{path}: the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Head(data).metadata()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except _DamagedError as error:
        raise ValueError(f"{path}: {error}") from error


class _DamagedError(Exception):
    """What is wrong with the head; the caller adds the file's name."""


class _Head:
    """A cursor over the head; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._offset = 0

    def metadata(self) -> dict[str, GgufValue]:
        if self._data[:4] != MAGIC:
            raise _DamagedError("not a GGUF file: it does not start with 'GGUF'")
        self._offset = 4
        version = self._number(_U32, "the version")
        if version not in SUPPORTED_VERSIONS:
            hint = " (a big-endian file?)" if version and version % (1 << 16) == 0 else ""
            raise _DamagedError(f"GGUF version {version} is not supported{hint}; 2 and 3 are")
        self._number(_U64, "the number of tensors")
        num_keys = self._number(_U64, "the number of keys")
        if num_keys > MAX_KEYS:
            raise _DamagedError(f"claims {num_keys} metadata keys; at most {MAX_KEYS} are read")
        values: dict[str, GgufValue] = {}
        for index in range(num_keys):
            key = self._string(f"the name of key {index}")
            if key in values:
                raise _DamagedError(f"metadata key {shown(key)} appears twice")
            label = printable(key)
            values[key] = self._value(self._number(_U32, f"the type of {label}"), label, depth=0)
        return values

    def _number(self, layout: struct.Struct, what: str) -> int:
        if self._offset + layout.size > self._size:
            raise _DamagedError(f"ends at byte {self._size}, inside {what}")
        (number,) = layout.unpack_from(self._data, self._offset)
        self._offset += layout.size
        return int(number)

    def _string(self, what: str) -> str:
        length = self._number(_U64, what)
        if length > min(self._size - self._offset, MAX_STRING_BYTES):
            raise _DamagedError(
                f"{what} claims {length} bytes; {self._size - self._offset} are left in the file"
                f" and at most {MAX_STRING_BYTES} are read"
            )
        end = self._offset + length
        raw = self._data[self._offset : end]
        self._offset = end
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _DamagedError(f"{what} is not UTF-8: {error.reason}") from error

    def _value(self, kind: int, key: str, *, depth: int) -> GgufValue:
        if kind == _STRING:
            return self._string(f"the value of {key}")
        if kind == _ARRAY:
            return self._array(key, depth=depth + 1)
        layout = _SCALARS.get(kind)
        if layout is None:
            raise _DamagedError(f"{key} has the unknown value type {kind}")
        if self._offset + layout.size > self._size:
            raise _DamagedError(f"ends at byte {self._size}, inside the value of {key}")
        (value,) = layout.unpack_from(self._data, self._offset)
        self._offset += layout.size
        scalar: int | float | bool = value
        return scalar

    def _array(self, key: str, *, depth: int) -> list[GgufValue]:
        if depth > MAX_ARRAY_DEPTH:
            raise _DamagedError(f"{key} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        kind = self._number(_U32, f"the item type of {key}")
        count = self._number(_U64, f"the length of {key}")
        layout = _SCALARS.get(kind)
        # The least an item can take: a string's length, or a nested array's type and length.
        item_size = layout.size if layout is not None else {_STRING: 8, _ARRAY: 12}.get(kind)
        if item_size is None:
            raise _DamagedError(f"{key} has the unknown item type {kind}")
        left = self._size - self._offset
        if count > MAX_ARRAY_ITEMS or count * item_size > left:
            raise _DamagedError(
                f"{key} claims {count} items; {left} bytes are left in the file"
                f" and at most {MAX_ARRAY_ITEMS} items are read"
            )
        if layout is not None:
            end = self._offset + count * item_size
            items: list[GgufValue] = [
                value for (value,) in layout.iter_unpack(self._data[self._offset : end])
            ]
            self._offset = end
            return items
        return [self._value(kind, key, depth=depth) for _ in range(count)]
