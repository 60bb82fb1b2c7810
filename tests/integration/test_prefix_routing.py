"""Two workers in each pool: a prompt goes where its beginning is, unless that one is loaded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from local_service import LocalService, collect, request
from tiny_models import make_llama_folder

from legato.cluster.prompt_hashes import PromptHashes

if TYPE_CHECKING:
    from pathlib import Path

    from local_service import Answer

LENGTH = 320
BLOCK_SIZE = 16


def prompt(tenant: int, tail: int) -> list[int]:
    return [(7 * tenant + i) % 200 for i in range(LENGTH)] + [tail]


async def ask(service: LocalService, token_ids: list[int]) -> Answer:
    message = request(token_ids, max_tokens=4, ignore_eos=True)
    return await collect(service.generation.Generate(message, timeout=60))


async def until_known(service: LocalService, worker_id: str, token_ids: list[int]) -> None:
    """The worker's report has come."""
    learnt, view = service.router.pool.learnt, service.router.pool.view(worker_id)
    assert view is not None
    assert view.identity is not None
    hashes = PromptHashes(token_ids, "").of(view.identity)
    async with asyncio.timeout(10):
        while learnt.prefixes.held_blocks(worker_id, hashes) < LENGTH // BLOCK_SIZE:  # noqa: ASYNC110  # the state is remote
            await asyncio.sleep(0.02)


async def until_free(service: LocalService) -> None:
    """The decode workers have told that nothing is held any more: load decides nothing then."""
    async with asyncio.timeout(10):
        while any(  # noqa: ASYNC110  # the state is remote
            v.load is None or v.snapshot().free_blocks < v.load.total_blocks
            for v in service.router.pool.placeable("decode")
        ):
            await asyncio.sleep(0.02)


@pytest.mark.integration
async def test_a_prompt_goes_where_its_beginning_is(tmp_path: Path) -> None:
    folder = make_llama_folder(tmp_path / "tiny")
    arguments = ["--block-size", str(BLOCK_SIZE)]
    async with LocalService(folder, prefill=2, decode=2, worker_args=arguments) as service:
        held: dict[int, Answer] = {}
        pool = service.router.pool
        prefills = sorted(view.worker_id for view in pool.placeable("prefill"))
        decodes = sorted(view.worker_id for view in pool.placeable("decode"))
        for tenant in range(4):
            # By turns one of each pool has more to do, so that each gets two of the prompts.
            busy_prefill, busy_decode = (
                pool.view(prefills[tenant % 2]),
                pool.view(decodes[tenant % 2]),
            )
            assert busy_prefill is not None
            assert busy_decode is not None
            busy_prefill.backlog_tokens += 2000
            busy_decode.used_blocks += 100
            held[tenant] = await ask(service, prompt(tenant, 1))
            busy_prefill.backlog_tokens -= 2000
            busy_decode.used_blocks -= 100
            timings = held[tenant].done.timings
            assert timings.prefill_worker == prefills[1 - tenant % 2]
            assert timings.decode_worker == decodes[1 - tenant % 2]
            await until_known(service, timings.prefill_worker, prompt(tenant, 1))
            await until_known(service, timings.decode_worker, prompt(tenant, 1))
        await service.wait_idle()
        for tail in (2, 3):
            for tenant in range(4):
                await until_free(service)
                again = (await ask(service, prompt(tenant, tail))).done
                before = held[tenant].done.timings
                assert again.timings.prefill_worker == before.prefill_worker
                assert again.usage.cached_prompt_tokens == LENGTH
                assert again.timings.decode_worker == before.decode_worker
                assert again.timings.handoff_reused_tokens == LENGTH
                await service.wait_idle()

        # Load has the last word.
        home = held[0].done.timings
        view = pool.view(home.prefill_worker)
        assert view is not None
        view.backlog_tokens += LENGTH + 1
        moved = (await ask(service, prompt(0, 4))).done
        view.backlog_tokens -= LENGTH + 1
        assert moved.timings.prefill_worker != home.prefill_worker
        assert moved.usage.cached_prompt_tokens == 0
        assert moved.timings.decode_worker == home.decode_worker
        assert pool.learnt.paths.rows_s().keys() <= {(p, d) for p in prefills for d in decodes}
