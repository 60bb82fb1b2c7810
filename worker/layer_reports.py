"""LayerReports: how many layers of one step have their new rows of KV in the pages."""

from __future__ import annotations

from typing import Any

import torch

from legato.kernels.progress import note_progress

# New KV after which the event loop is told: waking it costs some 50 us of a core, and a chunk of
# a transfer is larger still.
REPORT_BYTES = 256 << 10


class LayerReports:
    """Told by the forward pass, read by any thread."""

    def __init__(self, layer_bytes: int, wake_fd: int, device: torch.device) -> None:
        """`layer_bytes`: new KV of each layer that somebody waits for. `wake_fd` as for
        `note_progress`.
        """
        self._every = -(-REPORT_BYTES // layer_bytes)
        self._wake_fd = wake_fd
        self._device = device
        self._done = torch.zeros(1, dtype=torch.int64)
        self._number = self._done.numpy()  # the same memory, quicker to read
        self._events: list[Any] = []  # of the layers told of; torch has no type for them

    @property
    def num_done(self) -> int:
        """So many first layers have their rows in the pages; on a device, once `after` is over."""
        return int(self._number[0])

    def note(self, layer: int) -> None:
        """All rows of that layer were written by what has run, or is queued or recorded, so far."""
        if (layer + 1) % self._every:
            return
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type for it
            event.record()
            self._events.append(event)
        note_progress(self._done, layer + 1, self._wake_fd)

    def after(self, layer: int) -> object | None:
        """What a device's stream must wait for before it reads a layer that is done: an event."""
        return self._events[layer // self._every] if self._events else None
