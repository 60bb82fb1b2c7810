"""What a process may open: the limit is raised, and each of its ports has a share of it."""

from __future__ import annotations

import logging
import resource

# Of the files that a process may open. What no port takes is for workers' connections, weights,
# logs and Ray.
PORT_SHARE = 0.375

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


def share_of_open_files(share: float) -> int:
    """So many of the files that this process may open; no limit counts as one of 2^20."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(share * (soft if soft != resource.RLIM_INFINITY else 1 << 20))
