"""crc32c: the CRC-32C of bytes, at the speed of the memory where the C kernels were compiled."""

from __future__ import annotations

import ctypes

import google_crc32c

from legato.kernels import native
from legato.kernels.buffer_address import buffer_address

_BEST = 99  # no way has a higher number: see csrc/crc32c.c


def crc32c(data: memoryview | bytes, seed: int = 0) -> int:
    """Of contiguous `data` behind what `seed` is the checksum of."""
    if not native.available():
        return int(google_crc32c.extend(seed, bytes(data)))
    return native_crc32c(data, seed, _BEST)


def native_crc32c(data: memoryview | bytes, seed: int, way: int) -> int:
    """By table (0), the CPU's instruction (1) or products (2); at most the best there is here."""
    function = native.direct(
        "lg_crc32c",
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
    )
    with memoryview(data) as view:
        return int(function(seed, buffer_address(view), view.nbytes, way))


def best_way() -> int:
    """Of this CPU, as `native_crc32c` counts them."""
    return int(native.direct("lg_crc32c_best_way", ctypes.c_int)())
