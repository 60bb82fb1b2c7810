"""progress: tells, from inside a forward pass, how far it has come, and wakes who waits for it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from legato.kernels import native
from legato.kernels.layout import require_dtype, require_shape

if TYPE_CHECKING:
    from torch import Tensor


def note_progress(counter: Tensor, number: int, wake_fd: int) -> None:
    """counter[0] = number, once all operations before are done; then a byte to `wake_fd`.

    Args:
        counter: [1] int64 on the CPU. Whoever reads the number there sees what was written before.
        number: any.
        wake_fd: the writing end of a pipe that does not block; when it is full, its reader has
            been woken often enough and no byte is added. Open for as long as the program may run.
    """
    require_shape(counter, (1,), "counter")
    require_dtype(counter, torch.int64, "counter")
    if native.available():
        native.launch("lg_note_progress", (counter,), (number, wake_fd), num_tasks=1)
        return
    counter[0] = number
    with suppress(BlockingIOError):
        os.write(wake_fd, b"\0")
