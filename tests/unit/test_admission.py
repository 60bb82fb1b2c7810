"""Admission: who starts when, on a clock of our own and without a socket."""

from __future__ import annotations

import asyncio

import grpc
from admission_scene import Pool, Scene, View, settle

from legato.cluster.deadline import Deadline
from legato.cluster.policies import BATCH_AGEING_S


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


async def test_small_ones_pass_a_big_one_for_a_quarter_of_its_deadline_at_most() -> None:
    scene = Scene(max_passed_over_s=2.0)
    await scene.arrive("running", 50)
    entry = scene.queue.enter(1, Deadline(4.0, given=True))[0]
    await scene.arrive("big", 90, entry=entry)
    await scene.pass_time(0.9)
    await scene.arrive("small-1", 5)
    assert scene.started == ["running", "small-1"]
    await scene.pass_time(0.1)
    await scene.arrive("small-2", 5)
    assert scene.started == ["running", "small-1"]
    await scene.end("running")
    assert scene.started == ["running", "small-1", "big", "small-2"]


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
    assert not scene.placements["batch"].demand.batch  # nor does it yield on the worker any more
    await scene.end("batch")
    assert scene.started[-1] == "chat-2"
    await scene.arrive("batch-2", 100, batch=True)
    await scene.end("chat-2")
    assert scene.placements["batch-2"].demand.batch


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
    scene.pool.decode[0].used_blocks = 100
    await scene.arrive("long", 100, prefill=80)
    await scene.arrive("short", 100, prefill=1)
    assert scene.queue.num_queued == 1
    assert "81 prompt tokens and 121 expected ones" in (await scene.error("short")).message


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
    assert "decode pool has had no ready worker for 5.1 s" in error.message


async def test_a_client_with_a_deadline_is_told_just_before_it() -> None:
    scene = Scene(Pool(decode=[]), worker_wait_s=5.0)
    scene.pool.empty_since["decode"] = 0.0
    await scene.arrive("waits", 10, entry=scene.queue.enter(1, Deadline(60.0, given=True))[0])
    await scene.pass_time(59.0)
    assert not scene.tasks["waits"].done()
    await scene.pass_time(0.5)
    error = await scene.error("waits")
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "and the call's deadline is near" in error.message


async def test_a_worker_that_comes_before_the_deadline_serves() -> None:
    scene = Scene(Pool(decode=[]), worker_wait_s=5.0)
    scene.pool.empty_since["decode"] = 0.0
    await scene.arrive("waits", 10, entry=scene.queue.enter(1, Deadline(60.0, given=True))[0])
    await scene.pass_time(59.0)
    scene.pool.decode.append(View("new", 100))
    scene.pool.empty_since["decode"] = None
    await scene.pass_time(0.5)
    assert scene.started == ["waits"]


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
    entry = await scene.arrive("first", 100)
    await scene.arrive("later", 100)
    assert scene.started == ["first"]
    await scene.refuse("first", entry, 100)
    assert scene.started == []  # "later" asks for no less
    await scene.report()
    assert scene.started == ["first"]


async def test_the_queues_bound_holds_for_those_that_were_refused_by_a_worker() -> None:
    scene = Scene(max_queued_requests=2)
    entries = [
        await scene.arrive(name, 40, prefill=1, granted=False) for name in ("a", "b", "c", "d")
    ]
    assert scene.started == ["a", "b", "c", "d"]
    for name, entry in zip("dcba", reversed(entries), strict=True):
        await scene.refuse(name, entry, 40, prefill=1)
    assert scene.queue.num_queued == 4  # each had fewer than two before it when it came back
    await scene.arrive("e", 40, prefill=1)
    assert "limit 2" in (await scene.error("e")).message
    await scene.report()
    for name, entry in zip("abcd", entries, strict=True):
        await scene.refuse(name, entry, 40, prefill=1)
        if name in "cd":
            assert "limit 2" in (await scene.error(name)).message
    assert scene.queue.num_queued == 2


async def test_requests_of_two_routers_stand_in_the_order_of_arrival() -> None:
    old, new = Scene(), Scene()
    (a,) = old.queue.enter(1)
    await asyncio.sleep(0.001)
    (b,) = new.queue.enter(1)  # its first, and yet not before all of the other's
    await asyncio.sleep(0.001)
    (c,) = old.queue.enter(1)
    assert a.arrival < b.arrival < c.arrival


async def test_the_answers_of_a_request_stand_in_the_order_of_arrival() -> None:
    scene = Scene()
    first, second = scene.queue.enter(3), scene.queue.enter(1)
    arrivals = [e.arrival for e in (*first, *second)]
    assert arrivals == sorted(set(arrivals))
    await scene.arrive("running", 100)
    await scene.arrive("b", 100, entry=second[0])
    await scene.arrive("a2", 100, entry=first[2])
    await scene.arrive("a1", 100, entry=first[1])
    for name in ("running", "a1", "a2"):
        await scene.end(name)
    assert scene.started == ["running", "a1", "a2", "b"]


async def test_room_for_the_beginning_is_enough_to_ask() -> None:
    scene = Scene()
    await scene.arrive("a", 90, prefill=30)
    await scene.arrive("b", 90, prefill=30)
    await scene.arrive("c", 90, prefill=37)  # 31 + 31 + 38 rows
    assert scene.started == ["a", "b", "c"]
    await scene.arrive("d", 90, prefill=1)
    assert scene.started == ["a", "b", "c"]


async def test_a_refused_big_one_blocks_no_small_one_and_is_asked_for_once_a_report() -> None:
    scene = Scene(max_passed_over_s=2.0)
    entry = await scene.arrive("big", 90, prefill=10)
    await scene.refuse("big", entry, 90, prefill=10)
    for _ in range(5):
        scene.queue.dispatch()
        await settle()
    assert scene.started == []
    await scene.arrive("small", 50, prefill=10)
    assert scene.started == ["small"]
    await scene.arrive("as-big", 90, prefill=10)
    assert scene.started == ["small"]
    await scene.report()
    assert scene.started == ["small", "big", "as-big"]


async def test_while_an_overdue_one_asks_nobody_behind_it_takes_its_room() -> None:
    scene = Scene(max_passed_over_s=2.0)
    entry = await scene.arrive("big", 90, prefill=10, granted=False)
    await scene.refuse("big", entry, 90, prefill=10, granted=False)
    await scene.pass_time(3.0)
    for number in range(4):
        await scene.arrive(f"small-{number}", 20, prefill=10)
    for _ in range(5):
        await scene.report()  # it is asked for again, and refused again
        assert scene.started == ["big"]
        await scene.refuse("big", entry, 90, prefill=10, granted=False)
        assert scene.started == []
    await scene.report()
    scene.placements["big"].granted()
    await settle()
    assert scene.started == ["big", "small-0", "small-1", "small-2", "small-3"]


async def test_an_overdue_one_may_ask_elsewhere_and_its_worker_still_drains() -> None:
    pool = Pool(decode=[View("d1", 100, used_blocks=60), View("d2", 100, used_blocks=70)])
    scene = Scene(pool, max_passed_over_s=2.0)
    entry = await scene.arrive("big", 50)
    await scene.pass_time(3.0)  # d1 is kept free
    pool.decode[1].used_blocks = 20
    scene.queue.dispatch()
    await settle()
    assert scene.placements["big"].decode is pool.decode[1]
    scene.placements.pop("big").release()
    await scene.arrive("big-again", 50, entry=entry, granted=False)
    await scene.arrive("small", 5)
    assert "small" not in scene.started
    scene.placements["big-again"].granted()
    await settle()
    assert scene.started[-1] == "small"


async def test_an_overdue_batch_request_behind_a_blocked_chat_keeps_its_room() -> None:
    scene = Scene(max_passed_over_s=2.0)
    await scene.arrive("running", 80)
    await scene.arrive("batch", 50, batch=True)
    await scene.pass_time(3.0)
    await scene.arrive("chat", 40)  # younger, goes first, blocked as well
    await scene.arrive("small-batch", 10, batch=True)
    assert scene.started == ["running"]
    await scene.arrive("small-chat", 10)  # goes before it in any case
    assert scene.started == ["running", "small-chat"]
    await scene.end("running")
    assert scene.started == ["running", "small-chat", "chat", "batch"]


async def test_an_overdue_batch_request_that_only_may_not_pass_keeps_its_room() -> None:
    scene = Scene(max_passed_over_s=2.0)
    await scene.arrive("running", 60)
    chat = scene.queue.enter(1)[0]
    entry = scene.queue.enter(1)[0]
    scene.now += 3.0
    chat.arrived_at = scene.now
    await scene.arrive("chat", 50, prefill=20, entry=chat)  # 21 rows to begin with: it has room
    await scene.refuse("chat", chat, 50, prefill=20)
    await scene.arrive("big-batch", 30, prefill=29, batch=True, entry=entry)  # a longer prompt
    await scene.arrive("small-batch", 10, batch=True)
    assert scene.started == ["running"]
    await scene.report()
    assert scene.started == ["running", "chat"]
    await scene.end("running")
    assert scene.started[2:] == ["big-batch", "small-batch"]
