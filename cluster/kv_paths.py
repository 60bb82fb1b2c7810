"""KvPaths: from which prefill worker to which decode worker KV did not get of late."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.cluster.path_policies import Path

# A path that failed is not used for so long where there is another: a request that meets it broken
# waits up to 5 s, and a path that is whole again is found out of use for no longer than two such.
CLOSED_S = 10.0


class KvPaths:
    """Of a service. Both workers of a path that failed are heard, and are taken for well."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._closed_until: dict[Path, float] = {}

    def failed(self, path: Path) -> None:
        """KV did not get over it."""
        self._closed_until[path] = self._now() + CLOSED_S

    def passed(self, path: Path) -> None:
        """KV did."""
        self._closed_until.pop(path, None)

    def closed(self) -> frozenset[Path]:
        """Those that are not to be used where there is another."""
        if self._closed_until:
            now = self._now()
            self._closed_until = {
                p: until for p, until in self._closed_until.items() if now < until
            }
        return frozenset(self._closed_until)
