"""A bytes object to be filled in place: what gRPC sends, without a copy of it first."""

from __future__ import annotations

import ctypes

_WRITABLE = 0x200  # PyBUF_WRITE
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.restype = ctypes.c_void_p
_address_of.argtypes = [ctypes.py_object]
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.restype = ctypes.py_object
_view_of.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


def message_buffer(num_bytes: int) -> tuple[bytes, memoryview]:
    """New bytes, not initialised, and a view that writes to them. At least 2 of them: Python shares
    the shorter ones.

    CPython's C interface allows to fill bytes that were made without contents, as long as nobody
    has seen them: fill the view before the bytes are hashed, compared or given away. The view does
    not keep them alive.
    """
    assert num_bytes >= 2
    message: bytes = _new_bytes(None, num_bytes)
    view: memoryview = _view_of(_address_of(message), num_bytes, _WRITABLE)
    return message, view
