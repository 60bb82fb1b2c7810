"""OrphanWatch: a worker ends with its controller, where that is gone for good."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

import ray

if TYPE_CHECKING:
    from collections.abc import Callable

CONTROLLER_NAME = "controller"  # in the service's namespace; all other names there are workers'
LOOK_PERIOD_S = 5.0
NUM_LOOKS = 3

log = logging.getLogger(__name__)


async def end_with_controller(
    is_there: Callable[[], bool] | None = None,
    end: Callable[[int], object] = os._exit,
    period_s: float = LOOK_PERIOD_S,
) -> None:
    """Looks for the controller's actor until it has been missing NUM_LOOKS times in a row.

    One that restarts is there, and while Ray's head is lost the question has no answer and is
    waited for. It is missing where its machine was lost, and with it whoever would end the workers
    on other machines: these are detached, and Ray leaves them alone.
    """
    look = is_there or _controller_is_there
    num_missed = 0
    while num_missed < NUM_LOOKS:
        await asyncio.sleep(period_s)
        num_missed = 0 if await asyncio.to_thread(look) else num_missed + 1
    log.error("the service's controller is gone for good: this worker ends")
    logging.shutdown()
    end(0)


def _controller_is_there() -> bool:
    try:
        ray.get_actor(CONTROLLER_NAME, ray.get_runtime_context().namespace)
    except ValueError:
        return False
    return True
