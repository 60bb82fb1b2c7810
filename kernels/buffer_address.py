"""buffer_address: where a buffer's bytes lie, for C."""

from __future__ import annotations

import numpy as np


def buffer_address(buffer: memoryview) -> int:
    """Valid while the view is; of read-only buffers too, which ctypes refuses.

    Raises:
        ValueError: the buffer is not contiguous.
    """
    if not buffer.c_contiguous:
        raise ValueError("a buffer must be contiguous")
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)
