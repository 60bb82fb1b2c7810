"""Calls to actors: their bounds, and how they ended, in words."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from legato.cluster.role_change import RoleChangeRefusedError, UnknownWorkerError

CALL_TIMEOUT_S = 5.0  # of one small call between actors


async def bounded(call: Any) -> Any:  # noqa: ANN401  # Ray's references have no static type
    """What a call to the controller gives within CALL_TIMEOUT_S.

    Raises:
        ValueError: it refused; of a class of `role_change` where the refusal was.
        ConnectionError: it is gone.
        TimeoutError: no answer.
    """
    try:
        return await asyncio.wait_for(call, CALL_TIMEOUT_S)
    except RayTaskError as error:
        # A refusal of the controller arrives wrapped in the remote traceback.
        for kind in (UnknownWorkerError, RoleChangeRefusedError, ValueError):
            if isinstance(error.cause, kind):
                raise kind(str(error.cause)) from error
        raise
    except RayActorError as error:
        raise ConnectionError("the controller is gone: the service is ending") from error
    except TimeoutError as error:
        raise TimeoutError(f"the controller gave no answer within {CALL_TIMEOUT_S:g} s") from error


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
