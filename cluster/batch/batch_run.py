"""run_batch: the lines of a batch that have no answer yet, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from legato.cluster.batch.batch_endpoint import OutOfTimeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from legato.cluster.batch.batch_endpoint import BatchEndpoint, LineResult
    from legato.cluster.batch.batch_input import BatchInput, LineRef
    from legato.cluster.batch.batch_output import BatchOutput


class OnLine(Protocol):
    """Told of each line that is finished."""

    def __call__(self, *, failed: bool, num_tokens: int) -> None:
        """`num_tokens`: of its answers."""
        ...


@dataclass
class BatchOutcome:
    """How the run ended."""

    num_undone: int = 0  # lines whose time was up


async def run_batch(
    lines: BatchInput,
    output: BatchOutput,
    endpoint: BatchEndpoint,
    *,
    concurrency: int,
    on_line: OnLine,
) -> BatchOutcome:
    """Returns when every line is finished, or the deadline has come.

    Raises:
        ServiceError: the service is gone, or the output cannot be written. What is finished stays.
    """
    outcome = BatchOutcome()
    todo = iter([ref for ref in lines.lines if ref.custom_id not in output.finished])

    async def work(refs: Iterator[LineRef]) -> None:
        for ref in refs:  # shared: each takes the next one
            try:
                result = await endpoint.answer(lines.read(ref))
            except OutOfTimeError:
                outcome.num_undone += 1
                continue
            output.add(ref.custom_id, result.status, result.request_id, result.body)
            on_line(failed=result.status != 200, num_tokens=_num_tokens(result))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work(todo))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return outcome


def _num_tokens(result: LineResult) -> int:
    usage: Any = result.body.get("usage") if isinstance(result.body, dict) else None
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else 0
