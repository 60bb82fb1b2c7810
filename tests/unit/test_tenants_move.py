"""The tenant's salt goes with an answer, wherever it goes on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fake_worker import FakeWorker
from router_service import Service, ask, check_whole, collect, until

if TYPE_CHECKING:
    from collections.abc import Sequence

SALT = "tenant-a"
PROMPT, NUM_TOKENS = "the prompt of a tenant", 40


def salts(workers: Sequence[FakeWorker]) -> list[str]:
    return [reserve.cache_salt for worker in workers for reserve in worker.reserves]


async def test_an_answer_that_moves_with_its_kv_takes_its_salt_along() -> None:
    decodes = [FakeWorker("decode", step_s=0.01), FakeWorker("decode", step_s=0.01)]
    async with Service([FakeWorker("prefill")], decodes) as service:
        request = ask(PROMPT, NUM_TOKENS)
        request.cache_salt = SALT
        answering = asyncio.create_task(collect(service, request))
        await until(lambda: any(worker.starts for worker in decodes))
        [old] = [worker for worker in decodes if worker.starts]
        endpoints = [
            worker.endpoint(draining=worker is old) for worker in (*service.prefills, *decodes)
        ]
        await service.router.set_workers(endpoints)
        check_whole(await answering, PROMPT, NUM_TOKENS)
        assert old.num_moved == 1
        assert salts(decodes) == [SALT, SALT]
        await service.settle()


async def test_an_answer_that_is_replayed_takes_its_salt_along() -> None:
    prefills = [FakeWorker("prefill")]
    decodes = [FakeWorker("decode", step_s=0.01), FakeWorker("decode", step_s=0.01)]
    async with Service(prefills, decodes) as service:
        request = ask(PROMPT, NUM_TOKENS)
        request.cache_salt = SALT
        answering = asyncio.create_task(collect(service, request))
        await until(lambda: any(worker.starts for worker in decodes))
        [old] = [worker for worker in decodes if worker.starts]
        await old.die()
        check_whole(await answering, PROMPT, NUM_TOKENS)
        assert len(salts(decodes)) == 2
        assert set(salts(decodes)) == {SALT}
        assert [request.cache_salt for request in prefills[0].prefills] == [SALT, SALT]
