"""SIGTERM in the process of an actor: the actor is told, and Ray does not end it at once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import ray._private.worker as ray_worker

if TYPE_CHECKING:
    from collections.abc import Callable

# Ray's handler ends the process by calling this, which it looks up in its module when the signal
# comes. A handler of our own can be set by the main thread only, where nothing of an actor with an
# event loop ever runs. Where another version of Ray knows no such name, all is as it was.
_RAYS_END = "raise_sys_exit_with_custom_error_message"

log = logging.getLogger(__name__)


def at_sigterm(told: Callable[[], object]) -> None:
    """From now on each SIGTERM calls `told`, on the main thread, and nothing else happens."""
    if not hasattr(ray_worker, _RAYS_END):
        log.warning("this version of Ray ends a worker's process at SIGTERM without a drain")
        return

    def instead(*_: object, **__: object) -> None:
        told()

    setattr(ray_worker, _RAYS_END, instead)
