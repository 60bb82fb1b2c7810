"""Room on decode workers: refused, told of by reports, given by priority."""

from __future__ import annotations

import asyncio

from fake_worker import FakeWorker
from router_service import Service, ask, check_whole, collect, until


async def test_a_refused_big_one_lets_small_ones_by_and_is_tried_once_a_report() -> None:
    decode = FakeWorker("decode", total_blocks=1000)
    decode.faults.refuse_rows = 500
    async with Service([FakeWorker("prefill")], [decode], worker_silence_s=30) as service:

        def num_tries() -> int:
            return sum(r.sampling.max_tokens >= 600 for r in decode.reserves)

        decode.reporting.clear()
        await asyncio.sleep(0.1)  # a report may have been on its way
        big = [asyncio.create_task(collect(service, ask("big", 600 + i))) for i in range(4)]
        await until(lambda: service.router.admission.num_queued == 4)
        first_tries, first_reports = num_tries(), decode.num_reports
        assert 1 <= first_tries <= 4  # as many as came before the first was refused
        for number in range(5):
            check_whole(await collect(service, ask(f"s{number}", 20)), f"s{number}", 20)
        assert num_tries() == first_tries
        for tries in (1, 2):
            reports = decode.num_reports
            decode.reporting.set()
            await until(lambda before=reports: decode.num_reports > before)  # type: ignore[misc]  # binds now
            decode.reporting.clear()
            await until(lambda least=tries: num_tries() >= first_tries + least)  # type: ignore[misc]  # binds now
        await asyncio.sleep(0.05)
        # After the first time, one speaks for all.
        assert num_tries() <= first_tries + decode.num_reports - first_reports
        decode.faults.refuse_rows = None
        decode.reporting.set()
        for index, result in enumerate(await asyncio.gather(*big)):
            check_whole(result, "big", 600 + index)
        await service.settle()


async def test_growth_that_a_report_tells_of_takes_room() -> None:
    decode = FakeWorker("decode", total_blocks=10, step_s=0.01)
    async with Service([FakeWorker("prefill")], [decode]) as service:
        grows = asyncio.create_task(collect(service, ask("grow", 30)))  # 2 blocks at first
        view = next(v for v in service.router.pool.views() if v.worker_id == decode.worker_id)
        await until(lambda: view.load is not None and view.load.free_blocks < 6)
        assert view.snapshot().free_blocks == view.load.free_blocks  # type: ignore[union-attr]  # as waited for
        assert view.used_blocks == 0  # what reports tell of is not counted twice
        second = await collect(service, ask("b" * 20, 5))  # waits for 6 blocks
        assert grows.done()
        assert len(decode.reserves) == 2  # it was not even asked for before
        check_whole(second, "b" * 20, 5)


async def test_interactive_goes_first_and_the_workers_are_told_priorities() -> None:
    decode = FakeWorker("decode", total_blocks=8, step_s=0.005)
    async with Service([FakeWorker("prefill")], [decode]) as service:
        prompts = ["r" * 20, "b" * 20, "c" * 20]
        running = asyncio.create_task(collect(service, ask(prompts[0], 12)))
        await until(lambda: len(decode.reserves) == 1)
        batch = asyncio.create_task(collect(service, ask(prompts[1], 12, batch=True)))
        await until(lambda: service.router.admission.num_queued == 1)
        chat = asyncio.create_task(collect(service, ask(prompts[2], 12)))
        await asyncio.gather(running, batch, chat)
        order = [chr(r.token_ids[0]) for r in decode.reserves]
        assert order == ["r", "c", "b"]
        assert [r.priority for r in decode.reserves] == [1, 1, 2]
        first, third, second = (r.arrival for r in decode.reserves)
        assert first < second < third
