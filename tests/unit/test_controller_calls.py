"""Calls to a controller that restarts, refuses, is gone or says nothing; no Ray is started."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from legato.cluster.actors.calls import bounded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def answers(*outcomes: object) -> Callable[[], Awaitable[object]]:
    """One after the other; the last one for ever."""
    left = list(outcomes)

    async def ask() -> object:
        outcome = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return ask


def refused(cause: Exception) -> RayTaskError:
    return RayTaskError("scale", "", cause).as_instanceof_cause()


AWAY = ActorUnavailableError("restarting", None)


async def test_the_question_is_asked_again_while_the_controller_restarts() -> None:
    assert await bounded(answers(AWAY, AWAY, 7), 5.0) == 7


async def test_one_that_does_not_come_back_in_time_is_told_as_restarting() -> None:
    with pytest.raises(ConnectionError, match="restarting; try again"):
        await bounded(answers(AWAY), 0.5)


async def test_one_that_is_gone_is_not_asked_again() -> None:
    with pytest.raises(ConnectionError, match="is gone: the service is ending"):
        await bounded(answers(ActorDiedError(), 7), 5.0)


async def test_one_that_says_nothing_is_waited_for_within_the_bound() -> None:
    async def never() -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        await bounded(never, 0.1)


@pytest.mark.parametrize("cause", [ValueError("decode must be"), ConnectionError("no head")])
async def test_a_refusal_comes_as_it_was_raised(cause: Exception) -> None:
    with pytest.raises(type(cause), match=str(cause)):
        await bounded(answers(refused(cause)), 5.0)
