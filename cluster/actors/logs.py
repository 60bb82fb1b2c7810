"""begin_logging: what an actor's process says, in Ray's folder of logs."""

from __future__ import annotations

import logging


def begin_logging() -> None:
    """To standard error, which Ray writes to a file of the process's own; once a process."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("legato").setLevel(logging.INFO)
