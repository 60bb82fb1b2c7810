"""A cancellation that gRPC keeps to itself is not lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
from fake_worker import FakeWorker

from legato.cluster.cancellation import all_ended, check_cancellation
from legato.cluster.worker_calls import DecodeCall, PrefillCall, WorkerFailedError
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


@pytest.mark.parametrize("kind", [PrefillCall, DecodeCall])
async def test_a_worker_that_is_lost_between_its_choice_and_the_call(
    view: WorkerView, kind: type[PrefillCall | DecodeCall]
) -> None:
    view.lose("it hangs")
    with pytest.raises(WorkerFailedError, match="it hangs"):
        kind(view, 60.0)
    await view.close("it left the pool")
    with pytest.raises(WorkerFailedError, match="it left the pool"):
        kind(view, 60.0)
    assert not view.calls


@pytest.mark.parametrize("num_cancels", [0, 1, 3])
async def test_what_is_to_end_is_waited_for_however_often_the_wait_is_cancelled(
    num_cancels: int,
) -> None:
    end, over = asyncio.Event(), []

    async def work(name: str) -> None:
        await end.wait()
        over.append(name)

    tasks = [asyncio.create_task(work(name)) for name in "ab"]

    async def wait() -> None:
        await all_ended(tasks)
        over.append("waiting")

    waiting = asyncio.create_task(wait())
    for _ in range(num_cancels):
        await asyncio.sleep(0.01)
        waiting.cancel()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    end.set()
    await asyncio.wait({waiting})
    assert sorted(over) == (["a", "b"] if num_cancels else ["a", "b", "waiting"])
    assert waiting.cancelled() == (num_cancels > 0)
