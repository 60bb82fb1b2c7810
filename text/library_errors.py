"""library_errors: what goes wrong inside the tokenizers library, as a ValueError."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from legato.protos.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def library_errors(where: str) -> Iterator[None]:
    """Raises ValueError, which begins with `where`, for any failure inside.

    The library raises nothing narrower than Exception. Where its Rust code panics, that is none:
    for a pattern of tokenizer.json that tries more ways through a text than its regex engine
    allows (10 million from each place).
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"{where}: {printable(str(error))}") from error
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":  # the class cannot be imported
            raise
        raise ValueError(f"{where}: {printable(str(error))}") from error
