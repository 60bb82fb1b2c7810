"""Calls to actors: their bounds, and how they ended, in words."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

if TYPE_CHECKING:
    from collections.abc import Callable

from legato.cluster.role_change import RoleChangeRefusedError, UnknownWorkerError

CALL_TIMEOUT_S = 5.0  # of one small call between actors
COMMAND_TIMEOUT_S = 7.0  # of one to the controller, which may have to start again
RETRY_S = 0.2
_REFUSALS = (UnknownWorkerError, RoleChangeRefusedError, ValueError, ConnectionError)


async def bounded(ask: Callable[[], Any], timeout_s: float = COMMAND_TIMEOUT_S) -> Any:  # noqa: ANN401  # Ray's references have no static type
    """What the controller answers to `ask()`, asked again while it restarts: the same question
    twice must do no harm.

    Raises:
        ValueError: it refused; of a class of `role_change` where the refusal was.
        ConnectionError: it is gone, or is not back yet, or Ray's head is gone.
        TimeoutError: no answer.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while True:
        try:
            return await asyncio.wait_for(ask(), deadline_s - loop.time())
        except RayTaskError as error:
            # A refusal of the controller arrives wrapped in the remote traceback.
            for kind in _REFUSALS:
                if isinstance(error.cause, kind):
                    raise kind(str(error.cause)) from error
            raise
        except ActorUnavailableError as error:
            if loop.time() + RETRY_S >= deadline_s:
                raise ConnectionError("the controller is restarting; try again") from error
        except RayActorError as error:
            raise ConnectionError("the controller is gone: the service is ending") from error
        except TimeoutError as error:
            raise TimeoutError(f"the controller gave no answer within {timeout_s:g} s") from error
        await asyncio.sleep(RETRY_S)


async def result_of(call: Any) -> Any:  # noqa: ANN401  # Ray's references have no static type
    """For tasks, which take no reference of Ray's."""
    return await call


def outcome(call: Any) -> str:  # noqa: ANN401  # Ray's references have no static type
    """How a call has ended."""
    try:
        ray.get(call)
    except RayTaskError as error:
        return repr(error.cause)
    except RayError as error:
        return first_sentence(str(error))
    return "without an error"


def first_sentence(text: str) -> str:
    """Ray's reports fill a screen; their exit detail is the part that says something."""
    _, found, detail = text.partition("Worker exit detail: ")
    return (detail if found else text).strip().split("\n")[0].split(". ")[0][:300]
