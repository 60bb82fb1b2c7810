"""Several answers to one prompt: over fake workers."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_worker import SEED, FakeWorker
from router_service import Service, ask, check_whole, collect, collect_all, expected, text_of, until

from legato.protos import common_pb2, generation_pb2

STOP = common_pb2.FINISH_REASON_STOP


async def test_n_answers_come_of_one_prefill_and_one_decode_call() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode", tokens_per_event=3)
    decode.reused_tokens = 4
    async with Service([prefill], [decode]) as service:
        results = await collect_all(service, ask("hello", 12, n=4))
        for index, result in enumerate(results):
            check_whole(result, "hello", 12, index)
            timings = result.finish.timings
            assert (timings.prefill_forwards, timings.decode_forwards) == (1, 11)
            assert timings.kv_tokens_written == 5 + 11
            assert timings.handoff_reused_tokens == 4
            assert timings.decode_worker == decode.worker_id
            assert 0 < timings.ttft_s < timings.total_s
        assert len({text_of(result.token_ids) for result in results}) == 4
        assert [r.num_answers for r in (*prefill.prefills, *decode.reserves)] == [4, 4]
        await service.settle()
        assert service.router.counters.completed == 1


async def test_n_answers_of_one_token_never_leave_prefill() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode")
    async with Service([prefill], [decode]) as service:
        for index, result in enumerate(await collect_all(service, ask("hello", 1, n=3))):
            check_whole(result, "hello", 1, index)
        assert (len(prefill.prefills), decode.reserves) == (1, [])
        await service.settle()


async def test_one_yields_one_is_stopped_one_runs_to_its_end() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode", step_s=0.003)
    decode.faults.preempt_at = {SEED: [8]}
    async with Service([prefill], [decode], max_attempts=1) as service:
        ids = [expected("hello", 60, answer) for answer in range(3)]
        stop = text_of(ids[1][3:7])
        cut = text_of(ids[0]).find(stop), text_of(ids[2]).find(stop)
        results = await collect_all(service, ask("hello", 25, n=3, stop=[stop]))
        assert all(place < 0 or place > 25 for place in cut)
        check_whole(results[0], "hello", 25, 0)
        check_whole(results[2], "hello", 25, 2)
        assert results[1].token_ids == ids[1][:7]
        assert results[1].text == text_of(ids[1][:3])
        assert results[1].finish.finish_reason == STOP
        assert results[1].finish.stop_reason == stop
        assert decode.stops == [1]
        assert [r.finish.timings.preemptions for r in results] == [1, 0, 0]
        assert [r.num_answers for r in decode.reserves] == [3, 1]
        assert [r.sampling.seed for r in prefill.prefills] == [SEED, SEED]
        await service.settle()


async def test_those_that_stay_are_not_held_up_by_one_that_waits() -> None:
    decode = FakeWorker("decode", step_s=0.001)
    decode.faults.preempt_at = {SEED + 1: [5]}
    decode.faults.refuse_after_preemption = 10**6
    async with Service([FakeWorker("prefill")], [decode]) as service:
        finished: list[int] = []
        num_tokens = [0, 0, 0]
        async for response in service.client.generate(ask("hello", 30, n=3), timeout_s=20):
            num_tokens[response.index] += len(response.delta.token_ids)
            if response.HasField("finish"):
                finished.append(response.index)
            if len(finished) == 2:
                assert num_tokens[1] == 5 or decode.faults.refuse_reserves == 0
                decode.faults.refuse_reserves = 0
        assert finished == [0, 2, 1]
        assert num_tokens == [30, 30, 30]
        await service.settle()
    replay = decode.reserves[-1]
    assert replay.sampling.seed == SEED + 1
    assert list(replay.token_ids[5:]) == expected("hello", 5, 1)
    assert replay.arrival == decode.reserves[0].arrival + 1


async def test_first_tokens_that_end_answers_are_not_started() -> None:
    decode = FakeWorker("decode")
    async with Service([FakeWorker("prefill")], [decode]) as service:
        first = text_of(expected("hello", 1, 1))
        rest = [text_of(expected("hello", 8, answer)) for answer in (0, 2)]
        assert all(first not in text for text in rest)
        results = await collect_all(service, ask("hello", 8, n=3, stop=[first]))
        assert results[1].finish.finish_reason == STOP
        assert (results[1].text, len(results[1].token_ids)) == ("", 1)
        assert results[1].finish.timings.handoff_s == 0
        for answer in (0, 2):
            check_whole(results[answer], "hello", 8, answer)
        assert decode.stops == []
        await service.settle()


async def test_the_worker_of_several_answers_dies() -> None:
    prefill = FakeWorker("prefill")
    decodes = [FakeWorker("decode", step_s=0.005) for _ in range(2)]
    async with Service([prefill], decodes, max_attempts=2) as service:
        reading = asyncio.create_task(collect_all(service, ask("hello", 40, n=3)))
        await until(lambda: any(worker.num_tokens_sent > 12 for worker in decodes))
        victim, other = sorted(decodes, key=lambda worker: -worker.num_tokens_sent)
        await victim.die()
        for index, result in enumerate(await reading):
            check_whole(result, "hello", 40, index)
            assert result.finish.timings.attempts == 2
            assert result.finish.timings.preemptions == 0
            assert result.finish.timings.decode_worker == other.worker_id
        assert [r.num_answers for r in other.reserves] == [1, 1, 1]
        assert sorted(r.sampling.seed for r in other.reserves) == [SEED, SEED + 1, SEED + 2]
        await service.settle()
        assert service.router.counters.moved == 1  # one loss


async def test_before_the_first_token_they_are_tried_again_together() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode")
    prefill.faults.fail_prefills = 1
    decode.faults.refuse_reserves = 2
    async with Service([prefill], [decode]) as service:
        for index, result in enumerate(await collect_all(service, ask("hello", 6, n=3))):
            check_whole(result, "hello", 6, index)
            assert result.finish.timings.attempts == 2
        assert [r.num_answers for r in decode.reserves] == [3] * 4
        await service.settle()


async def test_one_answer_that_cannot_go_on_ends_the_request() -> None:
    prefill = FakeWorker("prefill")
    decode = FakeWorker("decode", total_blocks=1000, step_s=0.005)
    decode.faults.preempt_at = {SEED + 2: [3]}
    async with Service([prefill], [decode], max_attempts=2) as service:

        async def fail_later() -> None:
            await until(lambda: decode.num_tokens_sent > 2)
            prefill.faults.fail_prefills = 100

        failing = asyncio.create_task(fail_later())
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect_all(service, ask("hello", 200, n=3))
        await failing
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "failed 2 times (limit 2)" in (raised.value.details() or "")
        await service.settle()
        assert service.router.counters.failed == 1


async def test_a_client_that_leaves_frees_all_answers_wherever_they_are() -> None:
    prefill = FakeWorker("prefill")
    decode = FakeWorker("decode", total_blocks=1000, step_s=0.005)
    decode.faults.preempt_at = {SEED: [3]}
    async with Service([prefill], [decode]) as service:

        async def read() -> None:
            await collect_all(service, ask("hello", 400, n=4))

        reading = asyncio.create_task(read())
        # One runs alone, one waits, two run together.
        await until(lambda: len(prefill.prefills) == 2)
        decode.faults.refuse_reserves = 10**6
        decode.faults.preempt_at = {SEED + 1: list(range(400))}
        await until(lambda: len(decode.reserves) > 4)
        assert decode.open_calls >= 2
        reading.cancel()
        await service.settle()
        assert service.router.counters.cancelled == 1


async def test_a_slow_client_holds_back_all_its_answers() -> None:
    decode = FakeWorker("decode", total_blocks=10**6, tokens_per_event=2000)
    decode.faults.preempt_at = {SEED + 1: [1]}
    async with Service([FakeWorker("prefill")], [decode]) as service:
        sent: list[generation_pb2.GenerateResponse] = []
        writing = 0

        async def stuck(response: generation_pb2.GenerateResponse) -> None:
            nonlocal writing
            writing += 1
            assert writing == 1, "gRPC takes one message at a time"
            sent.append(response)
            if len(sent) == 8:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            writing -= 1

        slow = asyncio.create_task(service.router.generate(ask("slow", 10**6, n=3), stuck, 60.0))
        await until(lambda: len(sent) == 8)
        assert (await collect(service, ask("quick", 50))).token_ids == expected("quick", 50)
        before = -1
        while before != decode.num_tokens_sent:  # the worker stops: gRPC's windows are full
            before = decode.num_tokens_sent
            await asyncio.sleep(0.2)
        assert decode.num_tokens_sent < 2 * 10**6
        assert len(sent) == 8
        slow.cancel()
        await service.settle()


@pytest.mark.parametrize("read", [0, 1, 3])
async def test_a_client_that_reads_nothing_keeps_no_room_from_others(read: int) -> None:
    """Its answers come to their end all the same, and what they held is free for others."""
    decode = FakeWorker("decode", total_blocks=16)
    decode.faults.preempt_at = {SEED: [4]}
    async with Service([FakeWorker("prefill")], [decode]) as service:
        may_read, sent = asyncio.Event(), 0

        async def stuck(response: generation_pb2.GenerateResponse) -> None:
            nonlocal sent
            sent += 1
            if sent > read:
                await may_read.wait()

        # The one that leaves cannot go on before the client has read that far: that holds nothing.
        slow = asyncio.create_task(service.router.generate(ask("s" * 20, 20, n=2), stuck, 60.0))
        await until(lambda: len(decode.reserves) == 1 and decode.open_calls == 0)
        check_whole(await collect(service, ask("q" * 36, 20)), "q" * 36, 20)
        assert not slow.done()
        may_read.set()
        await slow
        await service.settle()


async def test_an_event_of_an_answer_that_is_not_there_is_a_fault() -> None:
    decode = FakeWorker("decode")
    async with Service([FakeWorker("prefill")], [decode]) as service:
        real = decode._tokens

        def wrong(number: int, answer: object) -> object:
            tokens = real(number, answer)  # type: ignore[arg-type]  # passed on
            tokens.answer = 7
            return tokens

        decode._tokens = wrong  # type: ignore[method-assign,assignment]  # a worker with a bug
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect_all(service, ask("hello", 5, n=2))
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        await service.settle()


async def test_at_the_last_finish_nothing_is_held_and_the_id_is_free() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        router = service.router
        finished: list[int] = []

        async def send(response: generation_pb2.GenerateResponse) -> None:
            if not response.HasField("finish"):
                return
            finished.append(response.index)
            assert ("x" in router._in_flight) is (len(finished) < 3)
            if len(finished) == 3:
                views = router.pool.views()
                assert all(not v.calls and not v.used_blocks for v in views)
            if len(finished) == 1:  # another may come with the id while this one is told its end
                await asyncio.sleep(0.01)

        for num_tokens in (1, 2, 8):
            await router.generate(ask("hello", num_tokens, n=3, request_id="x"), send, 20.0)
            assert sorted(finished) == [0, 1, 2]
            finished.clear()
        await service.settle()
