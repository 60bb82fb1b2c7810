"""raise_open_files: a process that takes connections may have as many as its machine lets it."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)


def raise_open_files() -> int:
    """Raises the soft limit, often 1,024, to the hard one: each connection is an open file, and
    where there is room for no more, nobody else gets in. Returns the limit that holds.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:  # a sandbox may say no
            log.warning("connections and files are limited to %d: %s", soft, error)
            return soft
    return hard
