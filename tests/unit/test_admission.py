"""Admission: who starts when, on a clock of our own and without a socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from legato.cluster.admission import Admission, Placement
from legato.cluster.config import RouterOptions
from legato.cluster.errors import RequestError
from legato.cluster.policies import BATCH_AGEING_S, Demand, WorkerSnapshot

if TYPE_CHECKING:
    from legato.cluster.control_plane import Role


@dataclass
class View:
    """As much of a WorkerView as admission looks at; a block is one token."""

    worker_id: str
    total: int
    used_blocks: int = 0
    backlog_tokens: int = 0
    full: bool = False

    @property
    def capacity_tokens(self) -> int:
        return self.total

    def snapshot(self) -> WorkerSnapshot:
        return WorkerSnapshot(
            worker_id=self.worker_id,
            block_size=1,
            total_blocks=self.total,
            free_blocks=self.total - self.used_blocks,
            backlog_tokens=self.backlog_tokens,
            full=self.full,
        )


@dataclass
class Pool:
    prefill: list[View] = field(default_factory=lambda: [View("p", 10**6)])
    decode: list[View] = field(default_factory=lambda: [View("d", 100)])
    empty_since: dict[Role, float | None] = field(
        default_factory=lambda: {"prefill": None, "decode": None}
    )

    def placeable(self, role: Role) -> list[View]:
        return self.prefill if role == "prefill" else self.decode

    def view(self, worker_id: str) -> View | None:
        found = [v for v in (*self.prefill, *self.decode) if v.worker_id == worker_id]
        return found[0] if found else None


class Scene:
    """A queue, a pool, a clock that stands still until told."""

    def __init__(self, pool: Pool | None = None, **options: Any) -> None:  # noqa: ANN401
        self.now = 0.0
        self.pool = pool or Pool()
        self.queue = Admission(
            RouterOptions(**options),
            self.pool,  # type: ignore[arg-type]  # what admission uses of it
            now=lambda: self.now,
        )
        self.started: list[str] = []
        self.placements: dict[str, Placement] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def arrive(
        self, name: str, decode: int, *, prefill: int = 1, batch: bool = False
    ) -> None:
        async def wait() -> None:
            placement = await self.queue.place(
                self.queue.enter(), Demand(prefill, decode, batch=batch), first=True
            )
            self.started.append(name)
            self.placements[name] = placement

        self.tasks[name] = asyncio.create_task(wait())
        await settle()

    async def end(self, name: str) -> None:
        self.placements.pop(name).release()
        await settle()

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.queue.dispatch()
        await settle()

    async def error(self, name: str) -> RequestError:
        with pytest.raises(RequestError) as raised:
            await asyncio.wait_for(self.tasks[name], 1)
        return raised.value


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_come_first_served_at_equal_size() -> None:
    scene = Scene()
    for name in ("a", "b", "c"):
        await scene.arrive(name, 60)
    assert scene.started == ["a"]
    await scene.end("a")
    assert scene.started == ["a", "b"]
    await scene.end("b")
    assert scene.started == ["a", "b", "c"]


async def test_small_ones_pass_a_blocked_big_one_only_for_a_while() -> None:
    scene = Scene(max_passed_over_s=2.0)
    await scene.arrive("running", 50)
    await scene.arrive("big", 90)
    await scene.arrive("small-1", 5)
    assert scene.started == ["running", "small-1"]
    await scene.pass_time(2.0)
    await scene.arrive("small-2", 5)
    assert scene.started == ["running", "small-1"]  # the worker is kept free for the big one
    await scene.end("running")
    assert scene.started == ["running", "small-1", "big", "small-2"]  # 5 + 90 + 5 fit


async def test_only_one_worker_is_kept_free_for_a_big_one() -> None:
    scene = Scene(Pool(decode=[View("d1", 100), View("d2", 100)]), max_passed_over_s=2.0)
    await scene.arrive("r1", 60)
    await scene.arrive("r2", 50)
    await scene.arrive("big", 90)
    await scene.pass_time(3.0)
    for name in ("s1", "s2", "s3"):
        await scene.arrive(name, 10)
    assert scene.started == ["r1", "r2", "s1", "s2", "s3"]
    on = {name: p.decode.worker_id for name, p in scene.placements.items() if p.decode}
    assert on["s1"] == on["s2"] == on["s3"] == on["r1"]
    await scene.end("r2")  # the worker kept free is empty now
    assert scene.started[-1] == "big"


async def test_a_stream_of_small_ones_does_not_starve_the_big_one() -> None:
    scene = Scene(max_passed_over_s=2.0)
    await scene.arrive("small-0", 20)
    await scene.arrive("small-1", 20)
    await scene.arrive("big", 100)
    for turn in range(2, 20):
        await scene.pass_time(0.5)
        await scene.arrive(f"small-{turn}", 20)
        if "big" in scene.started:
            break
        await scene.end(next(name for name in scene.started if name in scene.placements))
    assert "big" in scene.started
    assert "small-2" in scene.started  # it was passed at first
    assert scene.now <= 2.0 + 5 * 0.5


async def test_interactive_before_batch_and_batch_ages() -> None:
    scene = Scene()
    await scene.arrive("running", 100)
    await scene.arrive("batch", 100, batch=True)
    await scene.arrive("chat-1", 100)
    await scene.end("running")
    assert scene.started == ["running", "chat-1"]
    await scene.pass_time(BATCH_AGEING_S)
    await scene.arrive("chat-2", 100)
    await scene.end("chat-1")
    assert scene.started == ["running", "chat-1", "batch"]


async def test_the_queue_is_bounded_in_requests_with_a_hint() -> None:
    scene = Scene(max_queued_requests=2)
    for name in ("running", "q1", "q2", "too-many"):
        await scene.arrive(name, 100)
    error = await scene.error("too-many")
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "limit 2" in error.message
    assert error.retry_after_ms is not None
    assert error.retry_after_ms >= 100
    assert scene.queue.num_queued == 2


async def test_the_queue_is_bounded_in_tokens_but_takes_one_of_any_size() -> None:
    scene = Scene(max_queued_tokens=50)
    await scene.arrive("running", 100)
    await scene.arrive("long", 100, prefill=80)
    await scene.arrive("short", 100, prefill=1)
    assert scene.queue.num_queued == 1
    assert "81 prompt tokens" in (await scene.error("short")).message


async def test_a_request_that_leaves_the_queue_holds_nothing() -> None:
    scene = Scene()
    for name in ("running", "gone", "next"):
        await scene.arrive(name, 100)
    scene.tasks["gone"].cancel()
    await settle()
    await scene.end("running")
    assert scene.started == ["running", "next"]
    await scene.end("next")
    assert scene.pool.decode[0].used_blocks == 0


async def test_cancelled_in_the_moment_of_being_placed_loses_no_room() -> None:
    scene = Scene()
    await scene.arrive("running", 100)
    await scene.arrive("unlucky", 100)
    scene.placements.pop("running").release()
    scene.queue.dispatch()  # places "unlucky", whose task has not run yet
    assert scene.pool.decode[0].used_blocks == 100
    scene.tasks["unlucky"].cancel()
    await settle()
    assert scene.started == ["running"]
    assert scene.pool.decode[0].used_blocks == 0
    assert scene.pool.prefill[0].used_blocks == 0


async def test_what_no_present_worker_can_hold_fails_at_once_and_blocks_nobody() -> None:
    scene = Scene()
    await scene.arrive("huge", 101)
    await scene.arrive("small", 10)
    error = await scene.error("huge")
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "needs 101 KV tokens" in error.message
    assert "now holds 100" in error.message
    assert scene.started == ["small"]


async def test_too_big_for_one_decode_worker_goes_to_the_one_that_fits() -> None:
    scene = Scene(Pool(decode=[View("small", 50), View("large", 200, used_blocks=120)]))
    await scene.arrive("big", 60)
    placed = scene.placements["big"].decode
    assert placed is not None
    assert placed.worker_id == "large"


async def test_an_empty_pool_is_waited_for_within_a_bound() -> None:
    scene = Scene(Pool(decode=[]), worker_wait_s=5.0)
    scene.pool.empty_since["decode"] = 0.0
    await scene.arrive("waits", 10)
    await scene.arrive("prefill-only", 0)
    assert scene.started == ["prefill-only"]
    await scene.pass_time(4.9)
    assert not scene.tasks["waits"].done()
    await scene.pass_time(0.2)
    error = await scene.error("waits")
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "decode pool has had no ready worker for 5 s" in error.message


async def test_prefill_backlog_keeps_the_waiting_in_the_queue() -> None:
    scene = Scene(Pool(decode=[View("d", 10**6)]))
    for name in ("a", "b", "c"):
        await scene.arrive(name, 2000, prefill=2000)
    assert scene.started == ["a", "b"]
    scene.placements["a"].computed()
    await settle()
    assert scene.started == ["a", "b", "c"]


async def test_a_request_that_was_refused_returns_to_its_old_place() -> None:
    scene = Scene()
    entry = scene.queue.enter()
    first = await scene.queue.place(entry, Demand(1, 100), first=True)
    await scene.arrive("later", 100)
    back = asyncio.create_task(scene.queue.place(entry, Demand(1, 100), first=False))
    await settle()
    assert not back.done()
    first.release()
    await settle()
    assert back.done()
    assert scene.started == []
