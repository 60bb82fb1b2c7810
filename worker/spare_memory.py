"""spare_memory: memory that the process holds and does not need, kept small and given back."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_OWN_MAPPING_BYTES = 4 << 20
_KEPT_BYTES = 8 << 20
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ *(.*)")
_LIBRARY = re.compile(r"\.so(\.[\d.]+)?$")


def keep_little() -> None:
    """Tells the C library, where it is glibc, to give large blocks back when they are freed.

    By itself it keeps what it has seen freed once, up to 32 MB a block: a prompt of 2,000 tokens
    left 60 MB behind. Smaller blocks, such as a sampler's, stay for the next step.
    """
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back_freed() -> None:
    """What was freed and the C library keeps for later, where it is glibc.

    While a model is read, each matrix is freed once it is packed, and small tensors that stay lie
    between them: 390 MB were kept for nothing beside 670 MB of weights.
    """
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_objects() -> None:
    """Tells the garbage collector that what the process has made by now stays.

    For processes that have started and serve from now on: without this the first request waited
    0.1 s for a collection.
    """
    gc.collect()
    gc.freeze()


def let_go_of_objects() -> None:
    """Undoes `keep_objects`, for a process that begins anew, and frees what nobody refers to."""
    gc.unfreeze()
    gc.collect()


def give_back_code() -> None:
    """Pages of shared libraries that were mapped while the process started (on Linux).

    Most are never needed again, 50 MB and more of torch's; one that is comes back from the page
    cache in microseconds.
    """
    if sys.platform != "linux" or not hasattr(mmap, "MADV_DONTNEED"):
        return
    madvise = _libc().madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, stop in _clean_mappings(Path("/proc/self/smaps").read_text(encoding="utf-8")):
        madvise(start, stop - start, mmap.MADV_DONTNEED)  # no harm where it is refused


def _clean_mappings(smaps: str) -> Iterator[tuple[int, int]]:
    """Addresses of the libraries' read-only parts that hold nothing but the file's own bytes.

    Relocated addresses are read-only too, but no file has them: dropping them would be fatal.
    """
    found: tuple[int, int] | None = None
    for line in smaps.splitlines():
        match = _MAPPING.fullmatch(line)
        if match is not None:
            clean = match[3] in ("r-xp", "r--p") and _LIBRARY.search(match[4]) is not None
            found = (int(match[1], 16), int(match[2], 16)) if clean else None
        elif line.startswith(("Anonymous:", "Swap:")) and line.split()[1] != "0":
            found = None
        elif line.startswith("VmFlags:") and found is not None:  # the last line of a mapping
            yield found
            found = None


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
