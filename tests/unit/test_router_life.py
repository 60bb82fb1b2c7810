"""A request's life over fake workers, when nothing is lost."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from fake_worker import KV_BYTES_PER_TOKEN, FakeWorker, scripted_token
from router_service import Service, ask, collect, collect_all, expected, until

from legato.cluster.errors import ClientGoneError
from legato.cluster.timings import Phase
from legato.protos import common_pb2, generation_pb2


async def test_an_answer_its_text_usage_and_counters() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        result = await collect(service, ask("hello", 9))
        assert result.token_ids == expected("hello", 9)
        assert result.text == "".join(map(chr, expected("hello", 9)))
        finish = result.finish
        assert finish.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert finish.usage == generation_pb2.Usage(prompt_tokens=5, completion_tokens=9, seed=3)
        timings = finish.timings
        assert timings.prefill_forwards == 1
        assert timings.decode_forwards == 8
        assert timings.kv_tokens_written == 5 + 9 - 1
        assert timings.kv_bytes_handed_over == 5 * KV_BYTES_PER_TOKEN
        assert timings.attempts == 1
        assert timings.prefill_worker == service.prefills[0].worker_id
        assert timings.decode_worker == service.decodes[0].worker_id
        phases = [getattr(timings, phase.value) for phase in Phase]
        assert sum(phases) == timings.total_s
        assert all(value > 0 for value in phases)
        assert 0 < timings.ttft_s < timings.total_s
        assert timings.kv_transfer_s == 0.003
        assert timings.prefill_model_s == 0.002
        assert round(timings.decode_model_s, 9) == 0.008
        reserve = service.decodes[0].reserves[0]
        assert list(reserve.token_ids) == list(b"hello")
        assert reserve.num_prompt_tokens == 5
        assert (reserve.num_answers, reserve.num_preemptions) == (1, 0)
        assert reserve.priority == common_pb2.PRIORITY_INTERACTIVE
        assert reserve.sampling == service.prefills[0].prefills[0].sampling
        assert reserve.sampling.max_tokens == 9
        await service.settle()
        assert service.router.counters.completed == 1


async def test_one_token_never_leaves_prefill() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        result = await collect(service, ask("hello", 1))
        assert result.token_ids == expected("hello", 1)
        assert result.finish.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert service.decodes[0].reserves == []
        timings = result.finish.timings
        assert timings.decode_forwards == 0
        assert timings.kv_tokens_written == 5
        assert timings.ticket_s == timings.handoff_s == timings.decode_s == 0
        assert not service.prefills[0].prefills[0].HasField("ticket")
        await service.settle()


@pytest.mark.parametrize("eos_at", [0, 4])
async def test_eos_ends_the_answer_and_is_named(eos_at: int) -> None:
    prefill, decode = FakeWorker("prefill", eos_at=eos_at), FakeWorker("decode", eos_at=eos_at)
    async with Service([prefill], [decode]) as service:
        result = await collect(service, ask("hello", 30))
        assert result.token_ids == expected("hello", eos_at + 1)
        assert result.finish.finish_reason == common_pb2.FINISH_REASON_STOP
        assert result.finish.stop_reason == chr(result.token_ids[-1])
        await service.settle()


@pytest.mark.parametrize("tokens_per_event", [1, 5])
async def test_a_stop_string_ends_the_answer_here(tokens_per_event: int) -> None:
    decode = FakeWorker("decode", step_s=0.002, tokens_per_event=tokens_per_event)
    async with Service([FakeWorker("prefill")], [decode]) as service:
        ids = expected("hello", 200)
        stop = "".join(map(chr, ids[3:6]))
        result = await collect(service, ask("hello", 200, stop=[stop]))
        assert result.text == "".join(map(chr, ids[:3]))
        assert result.token_ids == ids[:6]  # the tokens of the stop string are delivered as ids
        assert result.finish.finish_reason == common_pb2.FINISH_REASON_STOP
        assert result.finish.stop_reason == stop
        await service.settle()
        assert decode.num_tokens_sent < 100
        assert decode.stops == [0]  # the worker knows that the answer ended, and how long it was


async def test_held_back_text_comes_at_the_end() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        ids = expected("hello", 6)
        stop = "".join(map(chr, ids[4:6])) + "?"
        result = await collect(service, ask("hello", 6, stop=[stop]))
        assert result.text == "".join(map(chr, ids))
        assert result.finish.finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_logprobs_stand_beside_their_tokens() -> None:
    decode = FakeWorker("decode", tokens_per_event=3)
    async with Service([FakeWorker("prefill")], [decode]) as service:
        values: list[float] = []
        async for response in service.client.generate(ask("hello", 8, logprobs=1)):
            if response.HasField("delta"):
                assert len(response.delta.logprobs) == len(response.delta.token_ids)
                values += [entry.logprob for entry in response.delta.logprobs]
        assert values == [-float(index) for index in range(8)]


async def test_fifty_at_once_each_with_its_own_answer() -> None:
    prefills = [FakeWorker("prefill"), FakeWorker("prefill")]
    decodes = [FakeWorker("decode", total_blocks=40), FakeWorker("decode", total_blocks=40)]
    async with Service(prefills, decodes) as service:
        prompts = [f"prompt {number}" for number in range(50)]
        results = await asyncio.gather(*(collect(service, ask(p, 12)) for p in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == expected(prompt, 12)
        await service.settle()
        assert service.router.counters.completed == 50
        assert all(worker.reserves for worker in decodes)


async def test_a_refused_reserve_goes_back_to_the_queue() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode")
    decode.faults.refuse_reserves = 5  # more than attempts may fail
    async with Service([prefill], [decode], max_attempts=3) as service:
        result = await collect(service, ask("hello", 5))
        assert result.token_ids == expected("hello", 5)
        assert result.finish.timings.attempts == 1  # it was never moved
        assert len(prefill.prefills) == 1  # and prefilled once
        assert [reserve.key.attempt for reserve in decode.reserves] == [1, 2, 3, 4, 5, 6]


async def test_a_worker_that_takes_nothing_is_given_up_on() -> None:
    decode = FakeWorker("decode")
    decode.faults.refuse_reserves = 100
    decode.faults.refusal_code = grpc.StatusCode.FAILED_PRECONDITION
    async with Service([FakeWorker("prefill")], [decode], max_attempts=3) as service:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(service, ask("hello", 5))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "limit 3" in (raised.value.details() or "")
        assert service.control.lost == []  # refusing is not dying
        await service.settle()


@pytest.mark.parametrize("phase", ["queue", "prefill", "handoff", "decode"])
async def test_a_client_that_leaves_frees_everything(phase: str) -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode", step_s=0.005)
    async with Service([prefill], [decode]) as service:
        if phase == "queue":
            decode.faults.refuse_reserves = 10**6
        elif phase == "prefill":
            prefill.prefill_s = 60.0
        elif phase == "handoff":
            prefill.faults.hold_handoff = True
        received: list[generation_pb2.GenerateResponse] = []

        async def read() -> None:
            async for response in service.client.generate(ask("hello", 200)):
                received.append(response)  # noqa: PERF401  # a leaving client keeps what it read

        reading = asyncio.create_task(read())
        await until(
            {
                "queue": lambda: len(decode.reserves) > 1,
                "prefill": lambda: len(prefill.prefills) == 1,
                "handoff": lambda: len(received) == 1,
                "decode": lambda: len(received) > 5,
            }[phase]
        )
        reading.cancel()
        await service.settle()
        assert service.router.counters.cancelled == 1
        decode.faults.refuse_reserves, prefill.prefill_s = 0, 0.0
        prefill.faults.hold_handoff = False
        assert (await collect(service, ask("again", 4))).token_ids == expected("again", 4)


async def test_a_deadline_that_cannot_be_met_is_refused_early_and_costs_no_prefill() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode", step_s=0.02)
    async with Service([prefill], [decode]) as service:
        running = asyncio.create_task(collect(service, ask("first", 55)))
        await until(lambda: service.router.admission.times.output_token_s is not None)
        decode.faults.refuse_rows = 50
        sent_s = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(service, ask("second", 55), timeout_s=0.7)  # it takes more than a second
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the call's deadline is too short for what" in (raised.value.details() or "")
        assert time.monotonic() - sent_s < 0.7
        assert (await running).token_ids == expected("first", 55)
        await service.settle()
        assert len(prefill.prefills) == 1


async def test_of_many_that_come_at_once_one_is_taken_in_a_round_of_the_loop() -> None:
    """So that those who ask for health meanwhile have their answers."""
    decode = FakeWorker("decode", total_blocks=2000)
    async with Service([FakeWorker("prefill")], [decode]) as service:
        router, gate, rounds, entered = service.router, asyncio.Event(), 0, []
        admit, enter = router._admit, router.admission.enter

        async def admit_together(*args: Any) -> Any:  # noqa: ANN401
            read = await admit(*args)
            await gate.wait()
            return read

        def note(*args: Any) -> Any:  # noqa: ANN401
            entered.append(rounds)
            return enter(*args)

        async def count() -> None:
            nonlocal rounds
            while True:
                rounds += 1
                await asyncio.sleep(0)

        router._admit, router.admission.enter = admit_together, note  # type: ignore[method-assign]
        asking = [
            asyncio.create_task(collect_all(service, ask(f"hello {turn}", 2, n=20)))
            for turn in range(30)
        ]
        await until(lambda: router.num_in_flight == 30)
        await asyncio.sleep(0.1)
        counting = asyncio.create_task(count())
        gate.set()
        await asyncio.gather(*asking)
        counting.cancel()
        assert len(entered) == 30
        assert len(set(entered)) == 30


async def test_the_default_deadline_names_its_limit_and_the_phase() -> None:
    prefill = FakeWorker("prefill", prefill_s=60.0)
    async with Service([prefill], [FakeWorker("decode")], default_deadline_s=0.2) as service:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in service.client.generate(ask("hello", 5)):
                pass
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        details = raised.value.details() or ""
        assert "default deadline of 0.2 s passed in phase prefill" in details
        await service.settle()


async def test_an_id_in_flight_is_refused_and_free_again_afterwards() -> None:
    decode = FakeWorker("decode", step_s=0.01)
    async with Service([FakeWorker("prefill")], [decode]) as service:
        first = asyncio.create_task(collect(service, ask("one", 30, request_id="x")))
        await until(lambda: len(decode.reserves) == 1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(service, ask("other", 5, request_id="x"))
        assert raised.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert (await first).token_ids == expected("one", 30)
        # The very message that ended the first one frees the id.
        for _ in range(5):
            again = await collect(service, ask("other", 2, request_id="x"))
            assert again.token_ids == expected("other", 2)


async def test_a_slow_client_holds_back_its_own_stream_only() -> None:
    decode = FakeWorker("decode", total_blocks=10**6, tokens_per_event=2000)
    async with Service([FakeWorker("prefill")], [decode]) as service:
        sent: list[generation_pb2.GenerateResponse] = []

        async def stuck(response: generation_pb2.GenerateResponse) -> None:
            sent.append(response)
            if len(sent) == 2:
                await asyncio.Event().wait()

        slow = asyncio.create_task(service.router.generate(ask("slow", 10**6), stuck, 60.0))
        await until(lambda: len(sent) == 2)
        assert (await collect(service, ask("quick", 50))).token_ids == expected("quick", 50)
        before = -1
        while before != decode.num_tokens_sent:  # the worker stops: gRPC's windows are full
            before = decode.num_tokens_sent
            await asyncio.sleep(0.2)
        assert decode.num_tokens_sent < 10**6
        assert len(sent) == 2
        slow.cancel()
        await service.settle()


async def test_a_client_lost_while_a_write_waits_is_a_cancelled_request() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:

        async def gone(response: generation_pb2.GenerateResponse) -> None:
            raise ClientGoneError

        with pytest.raises(ClientGoneError):
            await service.router.generate(ask("hello", 50), gone, 60.0)
        await service.settle()
        assert service.router.counters.cancelled == 1
        assert service.router.counters.failed == 0


def test_the_script_tells_positions_and_prompts_apart() -> None:
    assert len({scripted_token([1, 2], index) for index in range(26)}) == 26
    assert scripted_token([1, 2], 0) != scripted_token([1, 3], 0)
