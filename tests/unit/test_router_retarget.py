"""A decode worker lost before it began: the KV goes to another one, without a second prefill."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_worker import KV_BYTES_PER_TOKEN, FakeWorker
from router_service import Result, Service, ask, collect, collect_all, expected, until

from legato.protos import common_pb2


def check_moved_once(result: Result, prefill: FakeWorker, prompt: str, num_tokens: int) -> None:
    assert result.token_ids == expected(prompt, num_tokens)
    assert result.text == "".join(map(chr, expected(prompt, num_tokens)))
    timings = result.finish.timings
    assert (timings.attempts, timings.retargets) == (2, 1)
    assert timings.prefill_forwards == 1
    assert timings.kv_tokens_written == len(prompt) + num_tokens - 1
    assert timings.kv_bytes_handed_over == len(prompt) * KV_BYTES_PER_TOKEN
    assert len(prefill.prefills) == 1
    assert len(prefill.retargets) == 1


async def asked(decodes: list[FakeWorker]) -> FakeWorker:
    """The decode worker that gave the only ticket."""
    await until(lambda: any(worker.reserves for worker in decodes))
    return next(worker for worker in decodes if worker.reserves)


@pytest.mark.parametrize("loss", ["dies", "hangs", "leaves"])
@pytest.mark.parametrize("moment", ["prefill", "hand-off"])
async def test_a_lost_decode_worker_costs_no_second_prefill(loss: str, moment: str) -> None:
    prefill, decodes = FakeWorker("prefill"), [FakeWorker("decode"), FakeWorker("decode")]
    if moment == "prefill":
        prefill.prefill_s = 2.0 if loss == "hangs" else 0.3  # until its silence is noticed
    else:
        prefill.faults.hold_handoff = True
    async with Service([prefill], decodes, worker_silence_s=0.4) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 20)))
        victim = await asked(decodes)
        other = next(worker for worker in decodes if worker is not victim)
        await until(lambda: len(prefill.prefills) == 1)
        if moment == "hand-off":
            await until(lambda: bool(victim.starts))
        if loss == "dies":
            await victim.die()
        elif loss == "hangs":
            victim.hang()
        else:
            rest = [e for e in service.endpoints if e.worker_id != victim.worker_id]
            await service.router.set_workers(rest)
        await until(lambda: bool(prefill.retargets))
        prefill.faults.hold_handoff = False
        result = await reading
        check_moved_once(result, prefill, "hello", 20)
        assert result.finish.timings.decode_worker == other.worker_id
        [again], [retarget] = other.reserves, prefill.retargets
        first = victim.reserves[0]
        assert retarget.decode_address == other.address
        assert retarget.ticket.worker_id == other.worker_id
        assert again.key.request_id == first.key.request_id
        assert again.key.attempt > first.key.attempt
        again.key.attempt = first.key.attempt
        assert again == first
        assert service.router.counters.moved == 1
        victim.resume()
        await service.settle()


async def test_the_prefill_workers_word_that_decode_is_lost() -> None:
    prefill, decodes = FakeWorker("prefill"), [FakeWorker("decode"), FakeWorker("decode")]
    prefill.faults.cut_handoffs = 1
    async with Service([prefill], decodes) as service:
        result = await collect(service, ask("hello", 10))
        check_moved_once(result, prefill, "hello", 10)
        assert [len(worker.reserves) for worker in decodes] == [1, 1]
        await service.settle()


async def test_several_answers_move_together_and_ended_ones_stay_ended() -> None:
    prefill, decodes = FakeWorker("prefill"), [FakeWorker("decode"), FakeWorker("decode")]
    prefill.faults.cut_handoffs = 1
    ended = expected("hello", 1, 1)[0]
    async with Service([prefill], decodes) as service:
        results = await collect_all(service, ask("hello", 12, n=3, stop=[chr(ended)]))
        for number, result in enumerate(results):
            ids = expected("hello", 12, number)
            wanted = ids[: ids.index(ended) + 1] if ended in ids else ids
            assert result.token_ids == wanted
        assert results[1].token_ids == [ended]
        assert results[1].finish.timings.retargets == 0
        second = next(w for w in decodes if w.starts and w.num_tokens_sent)
        assert [a.answer for a in second.starts[-1].answers] == [0, 2]
        assert second.reserves[-1].num_answers == 3  # answers keep their numbers
        await service.settle()


async def test_the_only_decode_worker_is_asked_again_when_it_reports() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode")
    prefill.faults.cut_handoffs = 1
    async with Service([prefill], [decode]) as service:
        check_moved_once(await collect(service, ask("hello", 10)), prefill, "hello", 10)
        assert len(decode.reserves) == 2
        await service.settle()


async def test_refusals_on_the_way_are_no_failures() -> None:
    prefill, decodes = FakeWorker("prefill"), [FakeWorker("decode"), FakeWorker("decode")]
    prefill.faults.hold_handoff = True
    async with Service([prefill], decodes, max_attempts=2) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 10)))
        victim = await asked(decodes)
        other = next(worker for worker in decodes if worker is not victim)
        other.faults.refuse_reserves = 4
        await victim.die()
        await until(lambda: bool(prefill.retargets))
        prefill.faults.hold_handoff = False
        check_moved_once(await reading, prefill, "hello", 10)
        assert len(other.reserves) == 5
        await service.settle()


async def test_losses_on_the_way_are_bounded_by_max_attempts() -> None:
    prefill, decodes = FakeWorker("prefill"), [FakeWorker("decode") for _ in range(4)]
    prefill.faults.cut_handoffs = 100
    async with Service([prefill], decodes, max_attempts=3) as service:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(service, ask("hello", 10))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "limit 3" in (raised.value.details() or "")
        assert len(prefill.prefills) == 1
        assert len(prefill.retargets) == 2
        await service.settle()


async def test_a_loss_that_was_met_first_on_the_way_counts_once() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode")
    prefill.prefill_s = 0.3
    prefill.faults.cut_handoffs = 1
    async with Service([prefill], [decode], max_attempts=2) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 10)))
        await until(lambda: bool(decode.reserves))
        decode.faults.refuse_reserves = 1
        decode.faults.refusal_code = grpc.StatusCode.UNAVAILABLE
        check_moved_once(await reading, prefill, "hello", 10)
        assert len(decode.reserves) == 3
        await service.settle()


async def test_kv_that_was_not_kept_long_enough_is_computed_again() -> None:
    prefill, decodes = FakeWorker("prefill"), [FakeWorker("decode")]
    prefill.keep_s = 0.2
    prefill.faults.hold_handoff = True
    async with Service([prefill], decodes, max_attempts=2) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 10)))
        await until(lambda: bool(decodes[0].starts))
        await decodes[0].die()
        await until(lambda: prefill.used_blocks == 0)  # the kept time is over
        prefill.faults.hold_handoff = False
        replacement = FakeWorker("decode")
        service.decodes.append(replacement)
        await service.router.set_workers([service.endpoints[0], await replacement.start()])
        result = await reading
        assert result.token_ids == expected("hello", 10)
        assert (result.finish.timings.attempts, result.finish.timings.retargets) == (2, 0)
        assert len(prefill.prefills) == 2
        assert prefill.retargets == []
        await service.settle()


async def test_a_retarget_that_crosses_the_end_of_the_hand_off_is_not_waited_for() -> None:
    prefill, decodes = FakeWorker("prefill"), [FakeWorker("decode"), FakeWorker("decode")]
    prefill.faults.late_retarget = True
    async with Service([prefill], decodes) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 10)))
        victim = await asked(decodes)
        await until(lambda: bool(victim.starts))
        await victim.die()
        result = await reading
        assert result.token_ids == expected("hello", 10)
        assert result.finish.timings.attempts == 2
        assert len(prefill.prefills) == 2
        await service.settle()


async def test_prefill_lost_as_well_means_another_attempt() -> None:
    prefills, decodes = [FakeWorker("prefill"), FakeWorker("prefill")], [FakeWorker("decode")]
    for worker in prefills:
        worker.faults.hold_handoff = True
    async with Service(prefills, decodes) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 10)))
        await until(lambda: bool(decodes[0].starts))
        await decodes[0].die()
        await until(lambda: service.router.admission.num_queued == 1)  # for a decode worker
        victim = next(worker for worker in prefills if worker.prefills)
        await victim.die()
        for worker in prefills:
            worker.faults.hold_handoff = False
        replacement = FakeWorker("decode")
        service.decodes.append(replacement)
        await service.router.set_workers([*service.endpoints[:2], await replacement.start()])
        result = await reading
        assert result.token_ids == expected("hello", 10)
        assert sum(len(worker.prefills) for worker in prefills) == 2
        await service.settle()


async def test_decode_lost_after_the_hand_off_is_an_attempt_of_its_own() -> None:
    prefill, decodes = FakeWorker("prefill"), [FakeWorker("decode"), FakeWorker("decode")]
    for worker in decodes:
        worker.faults.hold_joining = True
    async with Service([prefill], decodes) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 10)))
        victim = await asked(decodes)
        await until(lambda: bool(victim.starts) and prefill.open_calls == 0)
        for worker in decodes:
            worker.faults.hold_joining = worker is victim
        await victim.die()
        result = await reading
        assert result.token_ids == expected("hello", 10)
        assert (result.finish.timings.attempts, result.finish.timings.retargets) == (2, 0)
        assert len(prefill.prefills) == 2
        await service.settle()


@pytest.mark.parametrize("end", ["client", "deadline"])
@pytest.mark.parametrize("where", ["queue", "asking", "hand-off"])
async def test_whoever_gives_up_while_it_moves_frees_everything(end: str, where: str) -> None:
    prefill, decodes = FakeWorker("prefill"), [FakeWorker("decode"), FakeWorker("decode")]
    prefill.faults.hold_handoff = True
    async with Service([prefill], decodes) as service:
        timeout_s = 20.0 if end == "client" else 1.0
        reading = asyncio.create_task(collect(service, ask("hello", 10), timeout_s))
        victim = await asked(decodes)
        other = next(worker for worker in decodes if worker is not victim)
        await until(lambda: bool(victim.starts))
        if where == "queue":
            other.phase = common_pb2.WORKER_PHASE_STARTING
            await until(lambda: len(service.router.pool.placeable("decode")) == 1)
        elif where == "asking":
            other.faults.refuse_reserves = 10**6
        await victim.die()
        await until(
            {
                "queue": lambda: service.router.admission.num_queued == 1,
                "asking": lambda: len(other.reserves) > 1,
                "hand-off": lambda: bool(prefill.retargets),
            }[where]
        )
        if end == "client":
            reading.cancel()
        await asyncio.wait({reading})
        await service.settle()
        assert len(prefill.prefills) == 1


async def test_losses_at_random_moments_lose_and_leak_nothing() -> None:
    prefills = [FakeWorker("prefill", prefill_s=0.01, handoff_s=0.01) for _ in range(2)]
    decodes = [FakeWorker("decode", step_s=0.001) for _ in range(3)]
    async with Service(prefills, decodes, max_attempts=8) as service:
        prompts = [f"prompt {number}" for number in range(40)]
        reading = [asyncio.create_task(collect(service, ask(p, 12))) for p in prompts]
        for turn in range(12):
            await asyncio.sleep(0.02)
            prefills[turn % 2].faults.cut_handoffs += 1
            decodes[turn % 3].faults.end_at = 4 if turn % 4 == 3 else None
        for worker in decodes:
            worker.faults.end_at = None
        for prompt, result in zip(prompts, await asyncio.gather(*reading), strict=True):
            assert result.token_ids == expected(prompt, 12)
        assert sum(len(worker.retargets) for worker in prefills) > 0
        await service.settle()
