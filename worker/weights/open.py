"""open_checkpoint: the right reader for a path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.weights.gguf_checkpoint import GgufCheckpoint
from legato.worker.weights.safetensors_checkpoint import SafetensorsCheckpoint

if TYPE_CHECKING:
    from pathlib import Path

    from legato.worker.weights.checkpoint import Checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a Hugging Face folder or a GGUF file; reads headers, but no weights yet.

    Raises:
        CheckpointError: what is there cannot be served.
    """
    return SafetensorsCheckpoint(path) if path.is_dir() else GgufCheckpoint(path)
