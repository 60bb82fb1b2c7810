"""ready_process: another process of a benchmark, from its first line to the end of its input."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0  # then it is killed


@asynccontextmanager
async def ready_process(module: str, *arguments: str) -> AsyncIterator[dict[str, Any]]:
    """Runs `python -m module`; yields the JSON line that it prints once it is ready. It is to end
    with its standard input, which is closed in the end.

    Raises:
        RuntimeError: it ended before it was ready.
        TimeoutError: it said nothing for START_TIMEOUT_S.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        if not line:
            status = await process.wait()
            raise RuntimeError(f"{module} ended before it was ready: status {status}")
        yield json.loads(line)
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
