"""Tenants with salts of their own share no KV, wherever a prompt may be found again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import httpx2
import pytest
from local_service import LocalService, collect, request
from tiny_models import make_llama_folder

from legato.cluster.caller import Caller
from legato.cluster.client import ClientAccess
from legato.cluster.config import RouterOptions
from legato.cluster.prompt_hashes import PromptHashes
from legato.protos import generation_pb2_grpc

if TYPE_CHECKING:
    from pathlib import Path

    from local_service import Answer

    from legato.cluster.router import Router

pytestmark = pytest.mark.integration

BLOCK_SIZE = 16
PROMPT = [(11 * i) % 200 for i in range(4 * BLOCK_SIZE)] + [7]
ARGUMENTS = ("--block-size", str(BLOCK_SIZE))
LENGTH = len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("tenants") / "tiny")


async def ask(
    stub: generation_pb2_grpc.GenerationAsyncStub, salt: str, num_tokens: int = 3
) -> Answer:
    message = request(PROMPT, max_tokens=num_tokens, ignore_eos=True)
    message.cache_salt = salt
    return await collect(stub.Generate(message, timeout=60))


def cached(answer: Answer) -> int:
    return answer.done.usage.cached_prompt_tokens


async def until_known(router: Router, salt: str) -> None:
    """Every worker's report of this tenant's blocks has come."""
    async with asyncio.timeout(10):
        while not all(held_blocks(router, salt).values()):  # noqa: ASYNC110  # the state is remote
            await asyncio.sleep(0.02)


def held_blocks(router: Router, salt: str) -> dict[str, int]:
    """Of the prompt, as the router believes of each worker."""
    held = {}
    for view in router.pool.views():
        assert view.identity is not None
        hashes = PromptHashes(PROMPT, salt).of(view.identity)
        held[view.worker_id] = router.pool.learnt.prefixes.held_blocks(view.worker_id, hashes)
    return held


async def test_prefill_and_handoff_find_the_tenants_own_blocks_alone(model: Path) -> None:
    async with LocalService(model, worker_args=ARGUMENTS) as service:
        stub = service.generation
        first = await ask(stub, "a")
        assert cached(first) == 0
        await until_known(service.router, "a")
        again = await ask(stub, "a")
        assert cached(again) == LENGTH
        assert again.done.timings.handoff_reused_tokens == LENGTH
        for other in ("b", "", "A", "a "):
            assert set(held_blocks(service.router, other).values()) == {0}
            answer = await ask(stub, other)
            assert cached(answer) == 0, other
            assert answer.done.timings.handoff_reused_tokens == 0
            assert answer.token_ids == first.token_ids
        # At another router, whose map comes of the same reports.
        async with (
            service.another_router() as (router, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            there: generation_pb2_grpc.GenerationAsyncStub
            there = generation_pb2_grpc.GenerationStub(channel)
            await until_known(router, "a")
            assert set(held_blocks(router, "c").values()) == {0}
            assert cached(await ask(there, "c")) == 0
            assert cached(await ask(there, "a")) == LENGTH
        await service.wait_idle()


@pytest.mark.parametrize("pools", [{"colocated": 1, "prefill": 0, "decode": 0}, {}])
async def test_who_computes_prompts_beside_decoding_keeps_tenants_apart(
    model: Path, pools: dict[str, int]
) -> None:
    # With a pair: the decode worker computes what is left of the prompt itself, which is all of it
    # for a tenant that has none of it there.
    options = RouterOptions(port=0, local_prefill_tokens=128)
    service = LocalService(model, worker_args=ARGUMENTS, options=options, **pools)
    async with service:
        first = await ask(service.generation, "a")
        await until_known_somewhere(service.router, "a")
        assert cached(await ask(service.generation, "a")) == LENGTH
        for other in ("b", ""):
            answer = await ask(service.generation, other)
            assert cached(answer) == 0
            assert answer.done.timings.handoff_reused_tokens == 0
            assert answer.token_ids == first.token_ids
        await service.wait_idle()


async def test_a_token_has_its_tenants_blocks_whatever_salt_comes_with_it(
    model: Path, tmp_path: Path
) -> None:
    file, tokens = tmp_path / "tokens", {t: f"token-of-tenant-{t}" for t in ("acme", "beta", "ops")}
    file.write_text(
        f"acme: {tokens['acme']}\nbeta client: {tokens['beta']}\nops admin: {tokens['ops']}\n"
    )
    options = RouterOptions(port=0, http_port=0, local_prefill_tokens=0, token_file=str(file))
    access = ClientAccess(token=tokens["ops"])
    async with (
        LocalService(model, worker_args=ARGUMENTS, options=options, client=access) as service,
        grpc.aio.insecure_channel(service.address) as channel,
        httpx2.AsyncClient(base_url=f"http://{service.router.http_address}", timeout=60) as web,
    ):
        stub: generation_pb2_grpc.GenerationAsyncStub
        stub = generation_pb2_grpc.GenerationStub(channel)

        async def hits(tenant: str, salt: str = "") -> int:
            message = request(PROMPT, max_tokens=3, ignore_eos=True)
            message.cache_salt = salt
            bearer = (("authorization", f"Bearer {tokens[tenant]}"),)
            return cached(await collect(stub.Generate(message, timeout=60, metadata=bearer)))

        async def http_hits(tenant: str, salt: str = "") -> int:
            headers = {"authorization": f"Bearer {tokens[tenant]}"}
            body = {"prompt": PROMPT, "max_tokens": 3, "cache_salt": salt}
            answer = await web.post("/v1/completions", json=body, headers=headers)
            found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        for salt in ("", "x"):
            assert await hits("acme", salt) == 0
            await until_known(service.router, Caller("acme", "client").salt(salt))
            for ask_hits in (hits, http_hits):
                assert await ask_hits("acme", salt) == LENGTH
        for salt in ("", "x", "acme", "acme\x20", "acme/x"):
            assert await hits("beta", salt) == 0, salt
        assert await http_hits("ops") == 0
        assert await http_hits("beta", "y") == 0
        await service.wait_idle()


async def until_known_somewhere(router: Router, salt: str) -> None:
    async with asyncio.timeout(10):
        while not any(held_blocks(router, salt).values()):  # noqa: ASYNC110  # the state is remote
            await asyncio.sleep(0.02)
