"""resolve_model: from what the user wrote (folder, .gguf file, hub id, demo) to a path here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.demo_model import DEMO_MODEL, find_demo_model
from legato.worker.weights.quoting import bare, quoted

if TYPE_CHECKING:
    from legato.worker.weights.download_progress import OnDownload

GGUF_MAGIC = b"GGUF"
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?")


def resolve_model(source: str, on_download: OnDownload | None = None) -> Path:
    """Finds a model, and downloads it where `source` is a hub id (`org/name[@revision]`).

    The word `demo` is the demo model. What exists on disk is a path. What only looks like one
    (begins with /, . or ~, ends with .gguf, has more than one slash) is an error. All else is a
    hub id.

    Raises:
        CheckpointError: nothing usable is there; the message says what to do.
    """
    if source == DEMO_MODEL:
        return find_demo_model()
    path = Path(source).expanduser()
    if source and _exists(path):
        _check(path)
        return path
    repo, _, revision = source.partition("@")
    looks_like_path = source.startswith(("/", ".", "~")) or source.endswith(".gguf")
    if looks_like_path or repo.count("/") > 1 or not _HUB_ID.fullmatch(repo):
        raise CheckpointError(
            f"model: no such folder or file: {quoted(source)}; check the path, or give a hub id "
            "(org/name) or `demo`"
        )
    if "@" in source and not revision:
        raise CheckpointError(f"model: {quoted(source)} names no revision after the @")
    # Here, because a local model needs no hub client, and its import takes 0.15 s.
    from legato.worker.weights.hub import fetch

    folder = fetch(repo, revision or None, on_download)
    _check(folder)
    return folder


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError) as error:  # no right to look, a name too long, a null byte
        raise CheckpointError(f"model: {quoted(str(path))} cannot be looked at: {error}") from error


def _check(path: Path) -> None:
    """Refuses what cannot be a model at the first glance."""
    try:
        if path.is_dir():
            _check_folder(path)
        else:
            with path.open("rb") as file:
                if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                    raise CheckpointError(
                        f"{path}: is no GGUF file: give a .gguf file, or the folder that holds "
                        "config.json and the safetensors files"
                    )
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _check_folder(folder: Path) -> None:
    if (folder / "config.json").exists():
        return
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        raise CheckpointError(f"{folder}: is an empty folder")
    gguf_names = [name for name in names if name.endswith(".gguf")]
    if gguf_names:
        raise CheckpointError(
            f"{folder}: has no config.json; to serve a GGUF file give its own path, such as "
            f"{folder / bare(gguf_names[0])}"
        )
    raise CheckpointError(f"{folder}: has no config.json, so it is no Hugging Face model folder")
