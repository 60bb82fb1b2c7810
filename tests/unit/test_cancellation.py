"""A cancellation that gRPC keeps to itself is not lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
from fake_worker import FakeWorker

from legato.cluster.cancellation import check_cancellation
from legato.cluster.worker_calls import DecodeCall, WorkerFailedError
from legato.cluster.worker_view import WorkerView
from legato.protos import worker_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def view() -> AsyncIterator[WorkerView]:
    worker = FakeWorker("decode")
    view = WorkerView(await worker.start())
    yield view
    await view.close("the test is over")
    await worker.die()


async def swallowing(begun: asyncio.Event, *, fails: bool) -> str:
    """As gRPC's wait for the start of a call whose end has come at the same time."""
    begun.set()
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        if fails:
            metadata = grpc.aio.Metadata()
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise grpc.aio.AioRpcError(code, metadata, metadata, "not now") from None
    return "a message"


@pytest.mark.parametrize("fails", [True, False])
async def test_a_step_that_swallows_the_cancellation(view: WorkerView, fails: bool) -> None:
    call = DecodeCall(view, 5.0)
    begun = asyncio.Event()
    task = asyncio.create_task(call._guard(swallowing(begun, fails=fails)))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    call.close()


async def test_outside_of_a_cancellation_nothing_happens() -> None:
    check_cancellation()


@pytest.mark.parametrize("turns", range(6))  # of the event loop, before the loss
async def test_a_call_whose_worker_is_lost_before_it_has_begun(
    view: WorkerView, turns: int
) -> None:
    call = DecodeCall(view, 60.0)
    reserving = asyncio.create_task(call.reserve(worker_pb2.Reserve()))
    for _ in range(turns):
        await asyncio.sleep(0)
    view.lost_reason = "its process ended"
    for each in tuple(view.calls):
        each.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(WorkerFailedError, match="its process ended"):
            await reserving
    call.close()
    assert not view.calls
