"""Workers that die, hang, refuse or lie: the stream goes on, or ends with a clear status."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import pytest
from fake_worker import FakeWorker
from router_service import Result, Service, ask, collect, expected, until

from legato.cluster.client import AsyncClient, CallFailedError
from legato.protos import common_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping


def workers(count: int, step_s: float = 0.005) -> list[FakeWorker]:
    return [FakeWorker("decode", step_s=step_s) for _ in range(count)]


async def running_on(decodes: list[FakeWorker]) -> FakeWorker:
    """The decode worker that the one request runs on, once it has sent some tokens."""
    await until(lambda: any(worker.num_tokens_sent > 4 for worker in decodes))
    return next(worker for worker in decodes if worker.num_tokens_sent)


def check_moved(result: Result, prompt: str, num_tokens: int) -> None:
    assert result.token_ids == expected(prompt, num_tokens)
    assert result.text == "".join(map(chr, expected(prompt, num_tokens)))
    assert result.finish.timings.attempts == 2
    assert result.finish.usage.prompt_tokens == len(prompt)
    assert result.finish.timings.prefill_forwards == 2


async def test_decode_dies_and_the_stream_goes_on_elsewhere() -> None:
    prefill, decodes = FakeWorker("prefill"), workers(2)
    async with Service([prefill], decodes) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 60)))
        victim = await running_on(decodes)
        await victim.die()
        result = await reading
        check_moved(result, "hello", 60)
        replay = prefill.prefills[1]
        assert replay.num_prompt_tokens == 5
        emitted = len(replay.token_ids) - 5
        assert list(replay.token_ids[5:]) == expected("hello", emitted)
        survivor = next(worker for worker in decodes if worker is not victim)
        timings = result.finish.timings
        assert timings.decode_worker == survivor.worker_id
        # Rows of the first try (its last token was never processed), then of the second.
        assert timings.kv_tokens_written == (5 + emitted - 1) + (5 + 60 - 1)
        await service.settle()
        await until(lambda: bool(service.control.lost))
        assert [worker_id for worker_id, _ in service.control.lost] == [victim.worker_id]
        assert service.router.counters.moved == 1
        assert (await collect(service, ask("next", 5))).finish.timings.attempts == 1


async def test_a_hanging_decode_worker_is_found_by_its_silence() -> None:
    decodes = workers(2)
    async with Service([FakeWorker("prefill")], decodes, worker_silence_s=0.4) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 60)))
        victim = await running_on(decodes)
        victim.hang()
        check_moved(await reading, "hello", 60)
        assert service.control.lost[0][0] == victim.worker_id
        assert "no report for" in service.control.lost[0][1]
        victim.resume()  # it reports again: trusted again, with nothing of the old call left
        await until(lambda: len(service.router.pool.placeable("decode")) == 2)
        await service.settle()


async def test_where_all_fall_silent_at_once_none_is_ended() -> None:
    """A machine that has no time for anybody: they are left out, and come back."""
    prefill, decodes = FakeWorker("prefill"), workers(2)
    async with Service([prefill], decodes, worker_silence_s=0.6) as service:
        for worker in (prefill, *decodes):
            worker.hang()
        await until(lambda: not service.router.pool.placeable("decode"))
        for worker in (prefill, *decodes):
            worker.resume()
        await until(lambda: len(service.router.pool.placeable("decode")) == 2)
        await asyncio.sleep(1.0)  # longer than the while that they have
        assert service.control.lost == []
        await collect(service, ask("next", 5))


async def test_our_own_stall_is_no_silence_of_the_workers() -> None:
    async with Service([FakeWorker("prefill")], workers(1), worker_silence_s=0.4) as service:
        pool = service.router.pool
        await asyncio.sleep(0.3)
        before = pool._now
        pool._now = lambda: before() + 5.0  # as if the loop had stood still for 5 s
        pool.check_silence()
        assert service.router.ready
        await asyncio.sleep(0.5)
        assert service.control.lost == []


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_worker_lost_by_our_own_stall_is_reported_only_where_it_stays_silent(
    hangs: bool,
) -> None:
    [decode] = decodes = workers(1)
    async with Service([FakeWorker("prefill")], decodes, worker_silence_s=0.8) as service:
        await service.client.wait_ready(5)
        pool = service.router.pool
        [view] = pool.placeable("decode")
        if hangs:
            decode.hang()
        before = pool._now
        pool._now = lambda: before() + 5.0  # as if the process had been stopped for 5 s
        pool.lose(view, "its load reports broke")  # as gRPC's own clock would have it
        assert not service.router.ready
        await asyncio.sleep(0.4)
        assert service.control.lost == []
        if hangs:
            await until(lambda: bool(service.control.lost))
        else:
            await until(lambda: service.router.ready)
            await asyncio.sleep(1.0)
            assert service.control.lost == []


async def test_a_worker_whose_connection_breaks_is_not_ended_where_it_is_there_again() -> None:
    # As all connections of a router do that has stood still for longer than their pings may wait.
    prefill, decodes = FakeWorker("prefill"), workers(2)
    async with Service([prefill], decodes) as service:
        for worker in (prefill, *decodes):
            worker.faults.break_reports = 1
        pool = service.router.pool
        await until(lambda: not any(w.faults.break_reports for w in (prefill, *decodes)))
        await until(lambda: not service.router.ready)
        await until(lambda: len(pool.placeable("decode")) == 2 and service.router.ready)
        assert (await collect(service, ask("hello", 5))).token_ids == expected("hello", 5)
        await asyncio.sleep(1.0)
        assert service.control.lost == []
        await decodes[0].die()
        await until(lambda: bool(service.control.lost))
        assert [worker_id for worker_id, _ in service.control.lost] == [decodes[0].worker_id]


@pytest.mark.parametrize("fault", ["ends", "cut short"])
async def test_a_stream_without_its_end_is_moved(fault: str) -> None:
    decode, other = FakeWorker("decode", step_s=0.001), FakeWorker("decode")
    if fault == "ends":
        decode.faults.end_at = 7
    else:
        decode.faults.cut_short_at = 7
    other.phase = common_pb2.WORKER_PHASE_STARTING  # until the first attempt runs
    async with Service([FakeWorker("prefill")], [decode, other]) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 30)))
        await until(lambda: decode.num_tokens_sent > 0)
        other.phase = common_pb2.WORKER_PHASE_READY
        result = await reading
        check_moved(result, "hello", 30)
        assert service.control.lost == []
        await service.settle()


async def test_prefill_dies_before_the_first_token() -> None:
    prefills = [FakeWorker("prefill", prefill_s=0.3), FakeWorker("prefill", prefill_s=0.3)]
    async with Service(prefills, workers(1)) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 10)))
        await until(lambda: any(worker.prefills for worker in prefills))
        victim = next(worker for worker in prefills if worker.prefills)
        await victim.die()
        result = await reading
        assert result.token_ids == expected("hello", 10)
        assert result.finish.timings.attempts == 2
        assert result.finish.timings.prefill_forwards == 1  # the lost one told nothing
        await service.settle()


async def test_prefill_dies_in_the_hand_off_after_the_first_token() -> None:
    prefills = [FakeWorker("prefill"), FakeWorker("prefill")]
    for worker in prefills:
        worker.faults.hold_handoff = True
    async with Service(prefills, workers(1)) as service:
        stream = service.client.generate(ask("hello", 10), timeout_s=20)
        token_ids = list((await anext(stream)).delta.token_ids)
        victim = next(worker for worker in prefills if worker.prefills)
        for worker in prefills:
            worker.faults.hold_handoff = worker is victim
        await victim.die()
        async for response in stream:
            token_ids += response.delta.token_ids
        assert token_ids == expected("hello", 10)
        assert response.finish.timings.attempts == 2
        await service.settle()


async def test_prefill_dies_after_the_hand_off_and_nobody_minds() -> None:
    prefill, decodes = FakeWorker("prefill"), workers(1)
    async with Service([prefill], decodes) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 30)))
        await running_on(decodes)
        await prefill.die()
        result = await reading
        assert result.token_ids == expected("hello", 30)
        assert result.finish.timings.attempts == 1


async def test_a_failed_hand_off_is_tried_again() -> None:
    prefill = FakeWorker("prefill")
    prefill.faults.fail_handoffs = 1
    async with Service([prefill], workers(1)) as service:
        check_moved(await collect(service, ask("hello", 10)), "hello", 10)
        assert service.control.lost == []
        await service.settle()


async def test_the_last_token_after_a_loss_needs_no_decode_worker() -> None:
    decodes = workers(1)
    decodes[0].faults.end_at = 4
    async with Service([FakeWorker("prefill")], decodes) as service:
        check_moved(await collect(service, ask("hello", 5)), "hello", 5)
        assert len(decodes[0].reserves) == 1
        await service.settle()


async def test_only_the_finish_was_lost_and_nothing_is_generated_again() -> None:
    prefill, decodes = FakeWorker("prefill"), workers(1)
    decodes[0].faults.lose_finish = True
    async with Service([prefill], decodes) as service:
        ids = expected("hello", 5)
        held_back = chr(ids[4]) + "?"
        result = await collect(service, ask("hello", 5, stop=[held_back]))
        assert result.token_ids == ids
        assert result.text == "".join(map(chr, ids))
        assert result.finish.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert len(prefill.prefills) == 1
        await service.settle()


async def test_attempts_are_bounded() -> None:
    prefill = FakeWorker("prefill")
    prefill.faults.fail_prefills = 100
    async with Service([prefill], workers(1), max_attempts=3) as service:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(service, ask("hello", 5))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "limit 3" in (raised.value.details() or "")
        assert len(prefill.prefills) == 3
        # Our own clients would make it again for a minute, at such a cost each time.
        trailers = tuple(raised.value.trailing_metadata())
        assert [value for key, value in trailers if key == "legato-retry"] == ["never"]
        assert "retry-after-ms" not in dict(trailers)
        async with AsyncClient(service.address) as client:
            with pytest.raises(CallFailedError, match="limit 3"):
                await client.generate("hello", max_tokens=5, temperature=0.0, timeout_s=30)
        assert len(prefill.prefills) == 6
        assert service.control.lost == []  # one request alone may be the one to blame
        await service.settle()


@pytest.mark.parametrize("index", [0, 5])
async def test_what_would_fail_on_every_worker_is_tried_on_one(index: int) -> None:
    prefills, decodes = [FakeWorker("prefill"), FakeWorker("prefill")], workers(2)
    for worker in (*prefills, *decodes):
        worker.faults.break_at = index
    async with Service(prefills, decodes, max_attempts=4) as service:
        for number in range(4):  # more than the failures that lose a worker
            stream = service.client.generate(ask(f"request {number}", 20))
            token_ids = [
                token for _ in range(index) for token in (await anext(stream)).delta.token_ids
            ]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await anext(stream)
            assert raised.value.code() is grpc.StatusCode.INTERNAL
            assert raised.value.details() == "NaN"
            assert token_ids == expected(f"request {number}", index)
        assert sum(len(worker.prefills) for worker in prefills) == 4
        assert service.router.counters.failed == 4
        assert service.router.counters.moved == 0
        await service.settle()
        assert len(service.router.pool.placeable("prefill")) == 2
        assert service.control.lost == []


async def test_a_worker_that_fails_everybody_is_reported() -> None:
    prefill = FakeWorker("prefill")
    prefill.faults.fail_prefills = 100
    async with Service([prefill], workers(1), max_attempts=1) as service:
        for number in range(3):
            assert service.control.lost == []
            with pytest.raises(grpc.aio.AioRpcError):
                await collect(service, ask(f"request {number}", 3))
        await until(lambda: bool(service.control.lost))
        assert service.control.lost[0][0] == prefill.worker_id
        assert "3 requests in a row failed" in service.control.lost[0][1]


async def test_failures_while_a_worker_begins_to_drain_do_not_lose_it() -> None:
    prefill, decodes = FakeWorker("prefill"), workers(1)
    async with Service([prefill], decodes, max_attempts=1, worker_wait_s=0.5) as service:
        running = asyncio.create_task(collect(service, ask("hello", 100)))
        await running_on(decodes)
        prefill.faults.fail_prefills = 3
        prefill.prefill_s = 0.1
        late = [asyncio.create_task(collect(service, ask(f"late {n}", 3), None)) for n in range(3)]
        await until(lambda: len(prefill.prefills) == 4)
        prefill.phase = common_pb2.WORKER_PHASE_DRAINING
        await asyncio.wait(late)
        assert all(isinstance(task.exception(), grpc.aio.AioRpcError) for task in late)
        await asyncio.sleep(0.1)
        assert service.control.lost == []
        assert (await running).finish.timings.attempts == 1


async def test_no_worker_left_ends_within_the_bound_naming_the_pool() -> None:
    decodes = workers(1)
    async with Service([FakeWorker("prefill")], decodes, worker_wait_s=0.5) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 60), None))
        await running_on(decodes)
        await decodes[0].die()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(reading, 5)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "decode pool has had no ready worker for 0." in (raised.value.details() or "")
        await service.settle()


async def test_with_a_deadline_it_waits_for_a_worker_until_that_is_near() -> None:
    decodes, deadline_s = workers(1), 3.0
    async with Service([FakeWorker("prefill")], decodes, worker_wait_s=0.1) as service:
        asked_at_s = time.monotonic()
        reading = asyncio.create_task(collect(service, ask("hello", 60), deadline_s))
        await running_on(decodes)
        await decodes[0].die()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await reading
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "deadline is near" in (raised.value.details() or "")
        assert deadline_s - 1 <= time.monotonic() - asked_at_s < deadline_s
        await service.settle()


async def test_losses_of_workers_that_had_decoded_for_a_while_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("legato.cluster.blame.WELL_AFTER_S", 0.0)
    decodes = workers(4)
    async with Service([FakeWorker("prefill")], decodes, max_attempts=2) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 200)))
        for _ in range(3):
            victim = await running_on(decodes)
            decodes.remove(victim)
            await victim.die()
        result = await reading
        assert result.token_ids == expected("hello", 200)
        assert result.finish.timings.attempts == 4
        await service.settle()


async def test_a_replacement_takes_the_stream_over() -> None:
    decodes = workers(1)
    async with Service([FakeWorker("prefill")], decodes) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 60)))
        await running_on(decodes)
        await decodes[0].die()
        await until(lambda: not service.router.ready)
        replacement = FakeWorker("decode")
        service.decodes.append(replacement)
        await service.router.set_workers([service.endpoints[0], await replacement.start()])
        check_moved(await reading, "hello", 60)
        await service.settle()


async def test_a_worker_taken_out_of_the_pool_moves_its_streams() -> None:
    decodes = workers(2)
    async with Service([FakeWorker("prefill")], decodes) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 60)))
        victim = await running_on(decodes)
        rest = [e for e in service.endpoints if e.worker_id != victim.worker_id]
        await service.router.set_workers(rest)
        check_moved(await reading, "hello", 60)
        await service.settle()


async def test_a_draining_worker_finishes_its_streams_and_gets_no_new_ones() -> None:
    decodes = workers(2)
    async with Service([FakeWorker("prefill")], decodes) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 60)))
        busy = await running_on(decodes)
        await service.router.set_workers(
            [service.prefills[0].endpoint(), *(w.endpoint(draining=w is busy) for w in decodes)]
        )
        assert not reading.done(), "nothing ran any more when the drain began"
        for number in range(6):
            await collect(service, ask(f"n{number}", 3))
        assert len(busy.reserves) == 1
        result = await reading
        assert result.token_ids == expected("hello", 60)
        assert result.finish.timings.attempts == 1


async def test_a_gap_in_the_indices_is_an_internal_error_and_no_token_follows_it() -> None:
    decodes = workers(1)
    decodes[0].faults.skip_index = 5
    async with Service([FakeWorker("prefill")], decodes) as service:
        token_ids: list[int] = []

        async def read() -> None:
            async for response in service.client.generate(ask("hello", 20)):
                token_ids.extend(response.delta.token_ids)

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read()
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        assert "the log has it as" in (raised.value.details() or "")
        assert "Traceback" not in (raised.value.details() or "")
        assert token_ids == expected("hello", 5)
        await service.settle()


async def refusal_of(service: Service, odd: Mapping[str, str | int]) -> str:
    """Why a further decode worker, which is odd in these, is not used."""
    worker = FakeWorker("decode")
    for name, value in odd.items():
        setattr(worker, name, value)
    service.decodes.append(worker)
    await service.router.set_workers([*service.endpoints, await worker.start()])
    await until(lambda: bool(service.control.lost))
    worker_id, reason = service.control.lost[0]
    assert worker_id == worker.worker_id
    return str(reason)


@pytest.mark.parametrize(
    ("odd", "field"),
    [
        ({"fingerprint": "f2"}, "model_fingerprint is 'f2', expected 'f1'"),
        ({"weights": "int8+float32"}, "weights is 'int8+float32', expected 'float32'"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', expected 'float32'"),
        ({"kv_dtype": "int8"}, "kv_layout.dtype is 'int8', expected 'float32'"),
        ({"kv_wire": "int8"}, "kv_wire is 'int8', expected 'same'"),
        ({"kv_wire": ""}, "kv_wire is '', expected 'same'"),
        ({"num_kv_heads": 2}, "kv_layout.num_kv_heads is 2, expected 1"),
        ({"protocol_version": 1}, "protocol_version is 1, expected 5"),
    ],
)
async def test_a_worker_that_does_not_fit_is_refused_naming_the_field(
    odd: dict[str, str | int], field: str
) -> None:
    async with Service([FakeWorker("prefill")], workers(1)) as service:
        assert field in await refusal_of(service, odd)
        assert len(service.router.pool.placeable("decode")) == 1


BF16 = {"weights": "bfloat16", "dtype": "bfloat16", "kv_dtype": "bfloat16"}


@pytest.mark.parametrize("kv_wire", ["float32", "bfloat16", "float16", "int8", "fp8"])
@pytest.mark.parametrize("odd", [BF16, {"kv_dtype": "int8"}])
async def test_dtypes_of_the_pools_may_differ_where_the_wire_has_one(
    odd: dict[str, str], kv_wire: str
) -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode")
    for name, value in odd.items():
        setattr(decode, name, value)
    prefill.kv_wire = decode.kv_wire = kv_wire
    async with Service([prefill], [decode]) as service:
        assert (await collect(service, ask("hello", 5))).token_ids == expected("hello", 5)
        model = await service.client.model()
        assert model.dtype == decode.dtype
        assert not service.control.lost


@pytest.mark.parametrize(
    ("odd", "kv_wire", "field"),
    [
        (BF16, "same", "weights"),
        ({"kv_dtype": "int8"}, "same", "kv_layout.dtype"),
        (BF16, "", "weights"),
        ({"weights": "int8+float32"}, "bfloat16", "weights"),
        ({"weights": "int4-g64+float32"}, "int8", "weights"),
        ({"fingerprint": "f2"}, "bfloat16", "model_fingerprint"),
        ({"num_kv_heads": 2}, "bfloat16", "kv_layout.num_kv_heads"),
        ({"kv_wire": "fp8"}, "int8", "kv_wire"),
        ({"kv_wire": "same"}, "bfloat16", "kv_wire"),
    ],
)
async def test_pools_that_do_not_fit_are_refused_naming_the_field(
    odd: dict[str, str | int], kv_wire: str, field: str
) -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode")
    prefill.kv_wire = decode.kv_wire = kv_wire
    for name, value in odd.items():
        setattr(decode, name, value)
    async with Service([prefill], []) as service:
        await until(lambda: bool(service.router.pool.placeable("prefill")))
        service.decodes.append(decode)
        await service.router.set_workers([*service.endpoints, await decode.start()])
        await until(lambda: bool(service.control.lost))
        assert service.control.lost[0][0] == decode.worker_id
        assert f": {field} " in service.control.lost[0][1]


@pytest.mark.parametrize("odd", [BF16, {"kv_dtype": "int8"}])
async def test_workers_of_one_pool_are_alike_whatever_the_wire(odd: dict[str, str]) -> None:
    """A request goes on from one to the other."""
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode")
    prefill.kv_wire = decode.kv_wire = "bfloat16"
    async with Service([prefill], [decode]) as service:
        refusal = await refusal_of(service, {"kv_wire": "bfloat16", **odd})
        assert "expected 'float32'" in refusal


async def test_block_sizes_may_differ() -> None:
    prefill, decode = FakeWorker("prefill", block_size=8), FakeWorker("decode", block_size=2)
    async with Service([prefill], [decode]) as service:
        assert (await collect(service, ask("hello", 5))).token_ids == expected("hello", 5)


async def test_another_process_at_the_address_is_not_the_worker() -> None:
    decodes = workers(1)
    async with Service([FakeWorker("prefill")], decodes) as service:
        real = decodes[0].endpoint()
        old = type(real)("decode-old", "decode", real.address)
        await service.router.set_workers([*service.endpoints, old])
        await until(lambda: bool(service.control.lost))
        assert service.control.lost[0][0] == "decode-old"
        assert "worker_id is" in service.control.lost[0][1]


async def test_a_loss_is_reported_until_the_controller_is_back() -> None:
    decodes = workers(2)
    async with Service([FakeWorker("prefill")], decodes) as service:
        service.control.is_away = True
        await decodes[0].die()
        await until(lambda: service.control.num_unheard > 1)
        assert (await collect(service, ask("hello", 5))).token_ids == expected("hello", 5)
        service.control.is_away = False
        await until(lambda: bool(service.control.lost))
        assert [worker_id for worker_id, _ in service.control.lost] == [decodes[0].worker_id]


async def test_a_loss_is_no_news_once_the_worker_has_left_the_list() -> None:
    decodes = workers(2)
    async with Service([FakeWorker("prefill")], decodes) as service:
        service.control.is_away = True
        await decodes[0].die()
        await until(lambda: service.control.num_unheard > 0)
        left = [e for e in service.endpoints if e.worker_id != decodes[0].worker_id]
        await service.router.set_workers(left)
        await until(lambda: not service.router.pool._chores)
        service.control.is_away = False
        assert service.control.lost == []
