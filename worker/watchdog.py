"""The watchdog: ends a worker whose engine does not come back from a step."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.worker.engine import Engine

_LOOK_EVERY_S = 1.0
# Generous: 2,048 tokens of a 7B model in fp32 take about 5 minutes on two CPU cores.
_PER_TOKEN_S = 0.2
# Triton compiles each kernel when a step first needs it.
_COMPILING_STEPS = 16
_COMPILING_TIMEOUT_S = 120.0


class EngineHungError(Exception):
    """A step took longer than any step can."""


async def watch(engine: Engine, step_timeout_s: float, *, compiles: bool) -> None:
    """Fails the engine when a step exceeds `step_timeout_s` plus 0.2 s for each of its tokens.

    The first steps of an engine that `compiles` its kernels get two minutes.
    """
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        busy_s, num_tokens = engine.busy()
        limit_s = step_timeout_s + _PER_TOKEN_S * num_tokens
        if compiles and engine.stats().steps < _COMPILING_STEPS:
            limit_s = max(limit_s, _COMPILING_TIMEOUT_S)
        if busy_s > limit_s:
            engine.fail(
                EngineHungError(
                    f"a step of {num_tokens} tokens has taken {busy_s:.1f} s, limit {limit_s:.1f} s"
                )
            )
            return
