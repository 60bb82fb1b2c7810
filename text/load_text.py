"""load_text_parts: what a model's files say about text, whichever kind of files they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.protos.printable import printable
from legato.text.gguf_text import load_gguf_text
from legato.text.hf_text import load_hf_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from legato.text.text_parts import TextParts


def load_text_parts(path: Path) -> TextParts:
    """Reads a Hugging Face folder or a .gguf file.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    load: Callable[[Path], TextParts]
    if path.is_dir():
        load = load_hf_text
    elif path.is_file() and path.suffix == ".gguf":
        load = load_gguf_text
    else:
        raise ValueError(f"{path}: no model there; a folder or a .gguf file is needed")
    try:
        return load(path)
    except ValueError as error:
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path}: {printable(str(error))}") from error
