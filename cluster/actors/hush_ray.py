"""hush_ray: what Ray would print in the service's own output goes to a log that is off."""

from __future__ import annotations

import logging

from ray._private import worker

log = logging.getLogger(__name__)


def hush_ray() -> None:
    """From now on, in this process. Of each worker that is lost Ray would print a long line with
    ids of its own, beside ours. Where this Ray has another name for what prints them, it goes on.
    """
    if callable(getattr(worker, "print_to_stdstream", None)):
        worker.print_to_stdstream = _note


def _note(data: dict[str, object], ignore_prefix: bool = False) -> None:  # as Ray calls it
    log.debug("Ray: %s", data.get("lines"))
