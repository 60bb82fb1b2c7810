"""The router and a decode worker that drains: its answers move with their KV."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import grpc
import pytest
from fake_worker import KV_BYTES_PER_TOKEN, FakeWorker
from router_service import Result, Service, ask, check_whole, collect, collect_all, until

from legato.cluster import departure
from legato.cluster.move_policies import is_worth_moving
from legato.cluster.worker_view import MOST_LEAVING
from legato.protos import common_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

DRAINING = common_pb2.WORKER_PHASE_DRAINING
STEP_S = 0.01
NUM_TOKENS = 120


@pytest.fixture(autouse=True)
def again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.cluster.departures.AGAIN_S", 0.05)


def decodes(count: int, step_s: float = STEP_S) -> list[FakeWorker]:
    return [FakeWorker("decode", step_s=step_s) for _ in range(count)]


async def source_of(workers: Sequence[FakeWorker]) -> FakeWorker:
    """That the only request runs on, once some tokens came."""
    await until(lambda: any(worker.num_tokens_sent > 4 for worker in workers))
    [source] = [worker for worker in workers if worker.open_calls]
    return source


async def drain(service: Service, worker: FakeWorker, how: str) -> None:
    """`scale-in`: the controller says so; `SIGTERM`: the worker itself."""
    if how == "scale-in":
        endpoints = [w.endpoint(draining=w is worker) for w in service.workers]
        await service.router.set_workers(endpoints)
    else:
        worker.phase = DRAINING


def check_moved(result: Result, prompt: str, num_moves: int = 1, answer: int = 0) -> None:
    check_whole(result, prompt, NUM_TOKENS, answer)
    timings = result.finish.timings
    assert (timings.moves, timings.attempts, timings.retargets) == (num_moves, 1, 0)
    assert timings.prefill_forwards == 1
    assert timings.decode_forwards == NUM_TOKENS - 1
    assert timings.kv_tokens_written == len(prompt) + NUM_TOKENS - 1


@pytest.mark.parametrize("how", ["scale-in", "SIGTERM"])
async def test_a_running_answer_moves_and_is_computed_nowhere_again(how: str) -> None:
    prefill, pair = FakeWorker("prefill"), decodes(2)
    async with Service([prefill], pair) as service:
        reading = asyncio.create_task(collect(service, ask("hello", NUM_TOKENS)))
        source = await source_of(pair)
        [target] = [worker for worker in pair if worker is not source]
        await drain(service, source, how)
        await until(lambda: source.open_calls == 0)
        assert not reading.done(), "it had far to go"
        result = await reading
        check_moved(result, "hello")
        assert result.finish.timings.decode_worker == target.worker_id
        [reserve] = target.reserves
        rows = len(reserve.token_ids)
        assert result.finish.timings.kv_bytes_handed_over == (5 + rows) * KV_BYTES_PER_TOKEN
        assert len(prefill.prefills) == 1
        assert (source.num_moved, source.num_resumed) == (1, 0)
        assert service.router.counters.moved_with_kv == 1
        assert service.router.counters.moved == 0
        status = await service.client.status()
        assert status.router.moved_with_kv == 1
        await service.settle()


async def test_each_of_several_answers_moves_by_itself() -> None:
    pair = [FakeWorker("decode", step_s=STEP_S, total_blocks=200) for _ in range(2)]
    async with Service([FakeWorker("prefill")], pair) as service:
        request = ask("hello", NUM_TOKENS, n=3, logprobs=0)
        reading = asyncio.create_task(collect_all(service, request))
        source = await source_of(pair)
        await drain(service, source, "scale-in")
        results = await reading
        for number, result in enumerate(results):
            check_moved(result, "hello", answer=number)
        assert source.num_moved == 3
        await service.settle()


async def test_a_stop_string_that_begins_on_one_worker_ends_on_the_other() -> None:
    """The worker knows nothing of it; what is held back of it is the router's."""
    async with asyncio.TaskGroup() as tasks:  # they mostly wait
        for length in range(2, 12):
            tasks.create_task(check_stop_string(length), name=f"length {length}")


async def check_stop_string(length: int) -> None:
    pair = decodes(2)
    async with Service([FakeWorker("prefill")], pair) as service:
        whole = await collect(service, ask("hello", NUM_TOKENS))
        stop = whole.text[20 : 20 + length]
        where = whole.text.index(stop)
        before = {worker: worker.num_tokens_sent for worker in pair}
        reading = asyncio.create_task(collect(service, ask("hello", NUM_TOKENS, stop=[stop])))
        await until(lambda: any(w.num_tokens_sent > before[w] + 16 for w in pair))
        [source] = [worker for worker in pair if worker.open_calls]
        await drain(service, source, "scale-in")
        result = await reading
        assert result.text == whole.text[:where], length
        assert result.finish.stop_reason == stop
        assert result.finish.timings.moves <= 1
        await service.settle()


async def test_at_any_moment() -> None:
    async with asyncio.TaskGroup() as tasks:  # they mostly wait
        for moment in range(2, 30, 3):
            tasks.create_task(check_moment(moment), name=f"moment {moment}")


async def check_moment(moment: int) -> None:
    pair = decodes(2, step_s=0.004)
    async with Service([FakeWorker("prefill", handoff_s=0.01)], pair) as service:
        reading = asyncio.create_task(collect(service, ask("hello", NUM_TOKENS)))
        await until(lambda: any(w.open_calls for w in pair))
        await asyncio.sleep(moment * 0.003)
        [source] = [worker for worker in pair if worker.open_calls]
        await drain(service, source, "scale-in" if moment % 2 else "SIGTERM")
        result = await reading
        check_whole(result, "hello", NUM_TOKENS)
        assert result.finish.timings.attempts == 1
        await service.settle()


# --- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["no room", "cut", "lost", "refused"])
async def test_a_move_that_fails_leaves_it_where_it_is_and_is_tried_again(fault: str) -> None:
    prefill, pair = FakeWorker("prefill"), decodes(2)
    async with Service([prefill], pair) as service:
        reading = asyncio.create_task(collect(service, ask("hello", NUM_TOKENS)))
        source = await source_of(pair)
        [target] = [worker for worker in pair if worker is not source]
        match fault:
            case "no room":
                target.faults.refuse_reserves = 2
            case "refused":
                target.faults.refuse_reserves = 1
                target.faults.refusal_code = grpc.StatusCode.FAILED_PRECONDITION
            case "cut":
                source.faults.cut_moves = 2
            case "lost":
                source.faults.hold_moves = True
        await drain(service, source, "scale-in")
        if fault == "lost":
            await until(lambda: target.open_calls > 0)
            await target.die()
            service.decodes.remove(target)
            await until(lambda: source.num_resumed > 0)
            source.faults.hold_moves = False
            again = FakeWorker("decode", step_s=STEP_S)
            service.decodes.append(again)
            await again.start()
            endpoints = [w.endpoint(draining=w is source) for w in service.workers]
            await service.router.set_workers(endpoints)
        check_moved(await reading, "hello")
        assert source.num_resumed >= 1
        assert len(prefill.prefills) == 1
        await service.settle()


async def test_with_nowhere_to_go_it_stays_and_goes_when_there_is() -> None:
    prefill, [source] = FakeWorker("prefill"), decodes(1)
    async with Service([prefill], [source], worker_wait_s=0.2) as service:
        reading = asyncio.create_task(collect(service, ask("hello", NUM_TOKENS)))
        await source_of([source])
        await drain(service, source, "scale-in")
        sent = source.num_tokens_sent
        await until(lambda: source.num_tokens_sent > sent + 30)
        assert source.num_parked == 0, "it need not stand still for that"
        target = FakeWorker("decode", step_s=STEP_S)
        await target.start()
        service.decodes.append(target)
        await drain(service, source, "scale-in")
        check_moved(await reading, "hello")
        await service.settle()


async def test_the_source_dies_in_the_middle_and_all_is_replayed() -> None:
    prefill, pair = FakeWorker("prefill"), decodes(3)
    async with Service([prefill], pair) as service:
        reading = asyncio.create_task(collect(service, ask("hello", NUM_TOKENS)))
        source = await source_of(pair)
        source.faults.hold_moves = True
        await drain(service, source, "SIGTERM")
        await until(lambda: source.num_parked == 1)
        await until(lambda: sum(worker.open_calls for worker in pair) == 2)
        await source.die()
        service.decodes.remove(source)
        result = await reading
        check_whole(result, "hello", NUM_TOKENS)
        assert result.finish.timings.moves == 0
        assert len(prefill.prefills) == 2
        await service.settle()


async def test_the_end_of_a_drain_is_no_failure_of_the_answer() -> None:
    prefill, pair = FakeWorker("prefill"), decodes(2)
    async with Service([prefill], pair, max_attempts=1) as service:
        reading = asyncio.create_task(collect(service, ask("hello", NUM_TOKENS)))
        source = await source_of(pair)
        source.faults.hold_parking = True  # it drains, and does not get rid of it
        await drain(service, source, "SIGTERM")
        await asyncio.sleep(0.1)
        await source.die()
        service.decodes.remove(source)
        result = await reading
        check_whole(result, "hello", NUM_TOKENS)
        assert result.finish.timings.attempts == 1
        await service.settle()


async def test_the_target_dies_when_it_has_arrived_and_it_is_replayed() -> None:
    prefill, pair = FakeWorker("prefill"), decodes(3)
    async with Service([prefill], pair) as service:
        reading = asyncio.create_task(collect(service, ask("hello", NUM_TOKENS)))
        source = await source_of(pair)
        for worker in pair:
            worker.faults.hold_joining = True
        await drain(service, source, "SIGTERM")
        await until(lambda: source.num_moved == 1)
        [target] = [w for w in pair if w.open_calls and w is not source]
        for worker in pair:
            worker.faults.hold_joining = False
        await target.die()
        service.decodes.remove(target)
        result = await reading
        check_whole(result, "hello", NUM_TOKENS)
        assert (result.finish.timings.moves, result.finish.timings.attempts) == (1, 2)
        await service.settle()


async def test_a_row_too_many_is_noticed() -> None:
    pair = decodes(2)
    async with Service([FakeWorker("prefill")], pair) as service:
        for worker in pair:
            worker.faults.extra_rows = 1
        reading = asyncio.create_task(collect(service, ask("hello", NUM_TOKENS)))
        source = await source_of(pair)
        await drain(service, source, "scale-in")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await reading
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        await service.settle()


@pytest.mark.parametrize("stage", ["pausing", "sending", "arrived"])
async def test_a_client_that_leaves_on_the_way_leaves_nothing(stage: str) -> None:
    pair = decodes(2)
    async with Service([FakeWorker("prefill")], pair) as service:
        reading = asyncio.create_task(collect(service, ask("hello", NUM_TOKENS)))
        source = await source_of(pair)
        [target] = [worker for worker in pair if worker is not source]
        source.faults.hold_parking = stage == "pausing"
        source.faults.hold_moves = stage == "sending"
        target.faults.hold_joining = True
        await drain(service, source, "scale-in")
        match stage:
            case "pausing":
                view = service.router.pool.view(target.worker_id)
                assert view is not None
                await until(lambda: view.used_blocks > 0)
            case "sending":
                await until(lambda: target.open_calls == 1)
            case "arrived":
                await until(lambda: source.num_moved == 1)
        reading.cancel()
        await asyncio.wait({reading})
        target.faults.hold_joining = False
        await service.settle()


async def test_no_more_than_a_few_stand_still_at_once() -> None:
    pair = [FakeWorker("decode", step_s=STEP_S, total_blocks=2000) for _ in range(2)]
    async with Service([FakeWorker("prefill", total_blocks=500)], pair) as service:
        [source, target] = pair
        source.faults.hold_moves = True
        target.phase = common_pb2.WORKER_PHASE_STARTING
        await until(lambda: len(service.router.pool.placeable("decode")) == 1)
        prompts = [chr(ord("a") + n) * 5 for n in range(16)]
        readings = [asyncio.create_task(collect(service, ask(p, NUM_TOKENS))) for p in prompts]
        source.step_s = 0.2  # none ends before all are there
        await until(lambda: source.open_calls == 16)
        source.step_s = STEP_S
        target.phase = common_pb2.WORKER_PHASE_READY
        await until(lambda: len(service.router.pool.placeable("decode")) == 2)
        await drain(service, source, "SIGTERM")
        await until(lambda: target.open_calls == MOST_LEAVING)
        await asyncio.sleep(0.1)
        assert target.open_calls == source.num_parked == MOST_LEAVING
        source.faults.hold_moves = False
        for prompt, result in zip(prompts, await asyncio.gather(*readings), strict=True):
            check_whole(result, prompt, NUM_TOKENS)
        assert source.num_moved > MOST_LEAVING
        await service.settle()


async def test_many_answers_and_workers_that_come_and_go() -> None:
    dice = random.Random(5)
    prefills = [FakeWorker("prefill", total_blocks=500) for _ in range(2)]
    pool = [FakeWorker("decode", step_s=0.004, total_blocks=2000) for _ in range(2)]
    async with Service(prefills, pool) as service:
        prompts = [chr(ord("a") + n % 26) * dice.randrange(1, 9) for n in range(40)]
        readings = [asyncio.create_task(collect(service, ask(p, NUM_TOKENS))) for p in prompts]
        await until(lambda: service.router.num_in_flight == 40)
        gone: list[FakeWorker] = []
        for _ in range(6):
            leaving = service.decodes[0]
            comer = FakeWorker("decode", step_s=0.004, total_blocks=2000)
            comer.faults.cut_moves = dice.randrange(2)
            await comer.start()
            service.decodes.append(comer)
            await service.router.set_workers([w.endpoint() for w in service.workers])
            await until(lambda: len(service.router.pool.placeable("decode")) == 3)
            await drain(service, leaving, "scale-in")
            await until(lambda leaving=leaving: leaving.open_calls == 0, 15)
            service.decodes.remove(leaving)
            gone.append(leaving)
            await service.router.set_workers([w.endpoint() for w in service.workers])
        for prompt, result in zip(prompts, await asyncio.gather(*readings), strict=True):
            check_whole(result, prompt, NUM_TOKENS)
            assert result.finish.timings.attempts == 1
        assert sum(worker.num_moved for worker in gone) >= 20
        await service.settle()
        await asyncio.gather(*(worker.die() for worker in gone))


def test_which_answers_are_worth_it() -> None:
    assert is_worth_moving(100, 0.05, None)
    assert not is_worth_moving(10, 0.05, None), "half a second: it ends by itself"
    assert is_worth_moving(11, 0.05, None)
    assert not is_worth_moving(100, 0.05, 6.0), "a move takes longer"
    assert is_worth_moving(1, None, None), "nothing is known of it"
    assert not is_worth_moving(0, None, None)


async def test_one_that_ends_soon_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.cluster.move_policies.LEAST_LEFT_S", 60.0)
    pair = decodes(2)
    async with Service([FakeWorker("prefill")], pair) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 60)))
        source = await source_of(pair)
        await drain(service, source, "scale-in")
        check_whole(await reading, "hello", 60)
        assert source.num_parked == 0
        await service.settle()


async def test_one_that_is_not_parked_in_time_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departure, "SLOW_S", 0.02)
    monkeypatch.setattr(departure, "PARK_TIMEOUT_S", 0.05)
    pair = decodes(2)
    async with Service([FakeWorker("prefill")], pair) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 60)))
        source = await source_of(pair)
        source.faults.hold_parking = True
        await drain(service, source, "scale-in")
        await until(lambda: source.num_resumed > 1)
        check_whole(await reading, "hello", 60)
        await service.settle()


async def test_a_slow_one_holds_up_no_other_and_moves_when_it_is_parked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(departure, "SLOW_S", 0.05)
    pair = [FakeWorker("decode", step_s=STEP_S, total_blocks=2000) for _ in range(2)]
    async with Service([FakeWorker("prefill", total_blocks=500)], pair) as service:
        [source, target] = pair
        target.phase = common_pb2.WORKER_PHASE_STARTING
        await until(lambda: len(service.router.pool.placeable("decode")) == 1)
        prompts = [chr(ord("a") + n) * 5 for n in range(12)]
        readings = [asyncio.create_task(collect(service, ask(p, NUM_TOKENS))) for p in prompts]
        source.step_s = 0.2  # none ends before all are there
        await until(lambda: source.open_calls == 12)
        source.step_s = STEP_S
        target.phase = common_pb2.WORKER_PHASE_READY
        await until(lambda: len(service.router.pool.placeable("decode")) == 2)
        source.faults.hold_parking = True
        await drain(service, source, "SIGTERM")
        view = service.router.pool.view(source.worker_id)
        assert view is not None
        await until(lambda: len([r for a in source._attempts.values() for r in a.pauses]) == 12)
        source.faults.hold_parking = False
        for prompt, result in zip(prompts, await asyncio.gather(*readings), strict=True):
            check_whole(result, prompt, NUM_TOKENS)
            assert result.finish.timings.attempts == 1
        assert source.num_moved > MOST_LEAVING
        await until(lambda: not view.leaving.locked() and view.leaving._value == MOST_LEAVING)
        await service.settle()
