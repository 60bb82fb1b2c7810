"""bar_for: tells how far a download from the hub is, in the place of the hub client's own bars."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tqdm.std import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable

    # Bytes that are there, and of all files that have begun: the latter grows.
    OnDownload = Callable[[int, int], None]


def bar_for(on_download: OnDownload) -> type[Any]:
    """A class for `snapshot_download`, which makes a bar of files and one or two of bytes. Those of
    bytes tell `on_download`, from any thread, some times a second; none is drawn.
    """

    class Told(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # as tqdm's
            kwargs.pop("name", None)  # of the hub's own class
            super().__init__(*args, **kwargs | {"file": _Nowhere(), "disable": False})

        def display(self, *_: Any, **__: Any) -> None:  # noqa: ANN401  # as above
            if self.unit == "B" and self.total:
                on_download(int(self.n), int(self.total))

        def close(self) -> None:
            self.disable = True

    return Told


class _Nowhere:
    """A file for what is not to be shown."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Forgets it."""
        return len(text)

    def flush(self) -> None:
        """Nothing is kept."""

    def fileno(self) -> int:
        """No terminal's."""
        raise OSError(os.strerror(25))
