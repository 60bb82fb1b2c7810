"""resolve_model_path: for the owner, which imports nothing of a worker's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def resolve_model_path(source: str, on_download: Callable[[int, int], None]) -> Path:
    """The folder or file of a model, downloaded if need be; ValueError or OSError if it is none.

    `on_download` gets the bytes that are there, and of all that has begun, from any thread.
    """
    from legato.worker.weights.source import resolve_model

    path: Path = resolve_model(source, on_download)
    return path
