"""Admission under overload: who is turned away, when, and what that costs the others."""

from __future__ import annotations

import grpc
import pytest
from admission_scene import Scene, settle

from legato.cluster.deadline import Deadline
from legato.cluster.errors import RequestError
from legato.cluster.policies import Demand

# Of a decode worker with 100 rows: one after the other.
ROWS = 100
OUTPUT = 41
PROMPT = ROWS + 1 - OUTPUT


class Measured(Scene):
    """A queue that knows its pace: 100 tokens a second leave it, an answer takes 0.5 s."""

    async def measure(self) -> None:
        for turn in range(17):
            await self.send(f"m-{turn}", deadline_s=1000.0)
        for turn in range(16):
            self.queue.times.note_start(0.1)
            self.queue.times.note_output(40, 0.4)
            self.queue.times.note_length(OUTPUT, OUTPUT)
            self.now += 1.01
            await self.end(f"m-{turn}")
            await settle()
        assert self.started == [f"m-{turn}" for turn in range(17)]

    async def send(self, name: str, *, deadline_s: float, batch: bool = False) -> None:
        entry = self.queue.enter(1, Deadline(self.now + deadline_s, given=True))[0]
        await self.arrive(name, ROWS, prefill=PROMPT, batch=batch, entry=entry)


async def test_one_whose_deadline_the_queue_cannot_meet_is_refused_at_once() -> None:
    scene = Measured()
    await scene.measure()
    for name in ("a", "b", "c"):
        await scene.send(name, deadline_s=60.0)
    await scene.send("hurry", deadline_s=2.0)
    error = await scene.error("hurry")
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "the call's deadline cannot be met: 2 s are left, and about " in error.message
    assert error.retry_after_ms is not None
    assert 1000 <= error.retry_after_ms <= 6000
    assert scene.queue.num_queued == 3


async def test_before_it_is_read_one_is_refused_by_the_same_rule_unless_it_might_pass() -> None:
    scene = Measured()
    await scene.measure()
    for name in ("a", "b", "c"):
        await scene.send(name, deadline_s=60.0)
    demand = Demand(PROMPT, ROWS)
    with pytest.raises(RequestError, match="cannot be met"):
        scene.queue.check_arrival(demand, demand, Deadline(scene.now + 2.0, given=True))
    scene.queue.check_arrival(demand, demand, Deadline(scene.now + 20.0, given=True))
    small = Demand(1, 2)
    # It may start on what is left.
    scene.queue.check_arrival(small, small, Deadline(scene.now + 0.1, given=True))


async def test_one_that_waits_is_given_up_when_its_time_has_become_too_short() -> None:
    scene = Measured()
    await scene.measure()
    await scene.send("waits", deadline_s=3.0)
    await scene.send("patient", deadline_s=60.0)
    await scene.pass_time(2.3)
    assert not scene.tasks["waits"].done()
    await scene.pass_time(0.3)  # 0.4 s are left for half a second's work
    error = await scene.error("waits")
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.retry_after_ms is not None
    await scene.end("m-16")
    assert scene.started[-1] == "patient"


async def test_one_that_comes_back_too_late_is_refused_at_once() -> None:
    """Its decode worker took so long to say that it has no room."""
    scene = Measured()
    await scene.measure()
    await scene.end("m-16")
    entry = scene.queue.enter(1, Deadline(scene.now + 3.0, given=True))[0]
    await scene.arrive("asks", ROWS, prefill=PROMPT, entry=entry, granted=False)
    assert scene.started[-1] == "asks"
    await scene.send("patient", deadline_s=60.0)
    await scene.pass_time(2.7)  # looks at who waits: not again for a while
    await scene.refuse("asks", entry, ROWS, prefill=PROMPT)
    error = await scene.error("asks")
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "0.3 s are left" in error.message


async def test_in_a_flood_a_batch_request_is_refused_at_once_also_where_nobody_waits() -> None:
    scene = Measured()
    await scene.measure()
    for turn in range(40):  # five times what the service can do
        await scene.send(f"chat-{turn}", deadline_s=0.1)
        await scene.error(f"chat-{turn}")
        await scene.pass_time(0.2)
    assert scene.queue.num_queued == 0
    await scene.send("batch", deadline_s=5.0, batch=True)
    assert "5 s are left, and about" in (await scene.error("batch")).message
    await scene.send("patient", deadline_s=300.0, batch=True)
    assert not scene.tasks["patient"].done()


async def test_one_that_work_has_begun_on_is_never_given_up() -> None:
    scene = Measured()
    await scene.measure()
    entry = scene.queue.enter(1, Deadline(scene.now + 0.2, given=True))[0]
    await scene.arrive("again", ROWS, prefill=PROMPT, entry=entry, begun=True)
    await scene.pass_time(0.15)
    assert not scene.tasks["again"].done()
    await scene.end("m-16")
    assert scene.started[-1] == "again"


async def test_a_full_queue_gives_up_the_youngest_batch_request_for_an_interactive_one() -> None:
    scene = Scene(max_queued_requests=2)
    await scene.arrive("running", 100)
    for name in ("batch-1", "batch-2"):
        await scene.arrive(name, 100, batch=True)
    await scene.arrive("batch-3", 100, batch=True)
    assert "2 requests wait (limit 2)" in (await scene.error("batch-3")).message
    await scene.arrive("chat", 100)
    error = await scene.error("batch-2")
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "gave way to an interactive one" in error.message
    assert error.retry_after_ms is not None
    assert scene.queue.num_queued == 2
    await scene.arrive("chat-2", 100)
    assert "gave way" in (await scene.error("batch-1")).message
    await scene.arrive("chat-3", 100)
    assert "limit 2" in (await scene.error("chat-3")).message, "interactive ones fill it"
    await scene.end("running")
    assert scene.started[-1] == "chat"


async def test_one_that_waited_alone_counts_though_its_ticket_comes_after_it_has_left() -> None:
    scene = Measured()
    entry = scene.queue.enter(1)[0]
    await scene.arrive("m-0", ROWS, prefill=PROMPT, entry=entry)
    for turn in range(16):  # never more than one waits, and each a second
        await scene.arrive(f"m-{turn + 1}", ROWS, prefill=PROMPT, granted=False)
        await scene.pass_time(1.0)
        await scene.end(f"m-{turn}")
        scene.placements[f"m-{turn + 1}"].granted()
    scene.queue.times.note_length(OUTPUT, OUTPUT)
    await scene.send("waits", deadline_s=60.0)
    await scene.send("hurry", deadline_s=0.5)
    assert "about 1 s are needed, 1 s of them" in (await scene.error("hurry")).message
    await scene.send("patient", deadline_s=5.0)
    assert not scene.tasks["patient"].done()


async def test_a_pool_without_workers_refuses_nobody_for_its_deadline() -> None:
    scene = Measured()
    await scene.measure()
    for name in ("a", "b", "c"):
        await scene.send(name, deadline_s=60.0)
    gone, scene.pool.decode = scene.pool.decode, []
    scene.pool.empty_since["decode"] = scene.now
    await scene.send("hurry", deadline_s=2.0)
    await scene.pass_time(1.0)
    assert not scene.tasks["hurry"].done(), "who knows when a worker comes"
    await scene.pass_time(20.0)
    assert (await scene.error("hurry")).code is grpc.StatusCode.UNAVAILABLE
    scene.pool.decode, scene.pool.empty_since["decode"] = gone, None
    await scene.send("later", deadline_s=7.0)
    await scene.pass_time(0.2)
    assert not scene.tasks["later"].done(), "time without workers is not theirs"
