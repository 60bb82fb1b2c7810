"""Streams that are cut go on at another router over the same worker processes, bit for bit."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from cut_streams import answers_of, check_every_cut, read, rest_of
from local_service import LocalService
from raw_client import RawClient
from tcp_proxy import TcpProxy
from tiny_models import make_llama_folder

from legato.cluster.client import AsyncClient, Finished, make_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

NUM_STREAMS, NUM_TOKENS = 24, 150
# Hot: bytes that are no characters, and other ones with every seed.
HOT: dict[str, Any] = {"temperature": 1.5, "ignore_eos": True}
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalService]:
    folder = make_llama_folder(tmp_path_factory.mktemp("models") / "tiny")
    async with LocalService(folder, decode=2) as service:
        yield service
        await service.wait_idle()


@asynccontextmanager
async def clients(service: LocalService) -> AsyncIterator[tuple[RawClient, RawClient]]:
    """Of two routers."""
    async with (
        service.another_router() as (_, address),
        RawClient(service.address) as first,
        RawClient(address) as other,
    ):
        yield first, other


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0, "logprobs": 2, "ignore_eos": True},
        {**HOT, "seed": 11, "logprobs": 1},
        {**HOT, **PENALTIES, "seed": 12, "logit_bias": {40: 3.0}},
        {**HOT, "top_p": 0.9, "top_k": 50},  # the router draws the seed
        {**HOT, **PENALTIES, "seed": 13, "n": 3, "max_tokens": 8},
    ],
    ids=["greedy", "seeded", "penalties", "drawn", "three"],
)
async def test_every_cut_of_a_stream(service: LocalService, settings: dict[str, Any]) -> None:
    request = make_request("Once upon", **{"max_tokens": 20, **settings})
    async with clients(service) as (first, other):
        whole = await check_every_cut(first, other, request)
    assert sum(len(r.delta.token_ids) for r in whole) == request.sampling.max_tokens * (
        request.n or 1
    )


async def test_every_cut_of_a_stream_that_a_stop_ends(service: LocalService) -> None:
    settings: dict[str, Any] = {**HOT, "seed": 21, "max_tokens": 20}
    async with clients(service) as (first, other):
        request = make_request("Once upon", **settings)
        whole = await read(first, request)
        [free] = answers_of(rest_of(request, whole)[0], whole)
        last = free.token_ids[12]
        by_token = make_request("Once upon", **settings, stop_token_ids=[last])
        ended = await check_every_cut(first, other, by_token)
        assert ended[-1].finish.usage.completion_tokens == free.token_ids.index(last) + 1

        middle = len(free.text) // 2
        stop = free.text[middle : middle + 4]
        by_text = make_request("Once upon", **settings, stop=[stop, free.text[2:5] + "\x00"])
        ended = await check_every_cut(first, other, by_text)
        assert ended[-1].finish.stop_reason == stop
        assert "".join(r.delta.text for r in ended) == free.text[: free.text.index(stop)]
        three = make_request("Once upon", **settings, n=3, stop=[stop])
        ended = await check_every_cut(first, other, three, step=3)
        assert sum(r.HasField("finish") for r in ended) == 3


async def test_a_router_dies_and_no_stream_of_its_clients_is_lost(service: LocalService) -> None:
    def settings(number: int) -> dict[str, Any]:
        how = {"temperature": 0.0} if number % 2 else {**HOT, **PENALTIES, "seed": number}
        return {"max_tokens": NUM_TOKENS, "ignore_eos": True, "timeout_s": 120.0, **how}

    async with AsyncClient(service.address) as client:
        wanted = [
            await client.generate(f"prompt {number}", **settings(number))
            for number in range(NUM_STREAMS)
        ]
    num_begun = 0
    all_begun = asyncio.Event()

    async def one(client: AsyncClient, number: int) -> int:
        nonlocal num_begun
        stream = client.stream(f"prompt {number}", **settings(number))
        ids: list[int] = []
        text = ""
        async for event in stream:
            if isinstance(event, Finished):
                assert event.finish.usage.completion_tokens == len(ids)
                continue
            num_begun += not ids
            if num_begun == NUM_STREAMS:
                all_begun.set()
            assert event.token_offset == len(ids)
            ids += event.token_ids
            text += event.text
        assert ids == wanted[number].token_ids
        assert text == wanted[number].text
        return stream.num_attempts

    async with (
        service.another_router() as (other, address),
        TcpProxy(service.address) as first,
        AsyncClient([first.address, address]) as client,
    ):
        running = [asyncio.create_task(one(client, number)) for number in range(NUM_STREAMS)]
        await all_begun.wait()
        assert service.router.num_in_flight > 0
        first.cut()
        num_attempts = await asyncio.gather(*running)
        assert sum(count > 1 for count in num_attempts) >= NUM_STREAMS // 4, "too few were cut"
        assert other.counters.completed >= NUM_STREAMS // 2
        await service.wait_idle()
