"""What a router believes of a worker that it shares with another router."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from legato.cluster.control_plane import WorkerEndpoint
from legato.cluster.policies import Demand
from legato.cluster.worker_view import PrefillShare, WorkerView
from legato.protos import common_pb2, worker_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOTAL = 100


@pytest_asyncio.fixture
async def view() -> AsyncIterator[WorkerView]:
    view = WorkerView(WorkerEndpoint("p", "prefill", "127.0.0.1:1"))
    view.identity = worker_pb2.WorkerIdentity(
        total_blocks=TOTAL, kv_layout=worker_pb2.KvLayout(block_size=10)
    )
    yield view
    await view.channel.close()


def report(view: WorkerView, held: int, waiting: int = 0) -> tuple[int, int]:
    """(free blocks, backlog) after it."""
    load = common_pb2.WorkerLoad(
        total_blocks=TOTAL, free_blocks=TOTAL - held, held_blocks=held, waiting_tokens=waiting
    )
    message = worker_pb2.WorkerReport(phase=common_pb2.WORKER_PHASE_READY, load=load)
    view.accept_report(message, 1.0)
    return now(view)


def now(view: WorkerView) -> tuple[int, int]:
    snapshot = view.snapshot()
    return snapshot.free_blocks, snapshot.backlog_tokens


def give(view: WorkerView, tokens: int) -> PrefillShare:
    return PrefillShare(view, Demand(prefill_tokens=tokens, decode_tokens=tokens + 1))


async def test_what_another_router_gave_out_is_not_free(view: WorkerView) -> None:
    assert report(view, held=60, waiting=500) == (40, 500)
    share = give(view, 100)
    assert now(view) == (30, 600)
    assert report(view, held=70, waiting=600) == (30, 600)
    share.release()
    assert report(view, held=70, waiting=600) == (40, 500)  # it may be as old as the share
    assert report(view, held=60, waiting=500) == (40, 500)
    assert report(view, held=0) == (TOTAL, 0)


async def test_what_this_router_gave_out_is_counted_once(view: WorkerView) -> None:
    first, second = give(view, 300), give(view, 200)
    assert now(view) == (50, 500)
    assert report(view, held=50, waiting=500) == (50, 500)
    first.release()
    assert now(view) == (80, 200)
    assert report(view, held=50, waiting=500) == (80, 200)  # older than the release
    second.release()
    assert report(view, held=20, waiting=200) == (TOTAL, 0)
