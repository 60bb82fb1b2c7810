"""Client and AsyncClient against two routers over the same (fake) workers, and their ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from fake_worker import SEED, FakeWorker
from router_service import Service, another_router, expected, text_of, until
from tcp_proxy import TcpProxy

from legato.cluster.client import (
    AsyncClient,
    AsyncStream,
    CallFailedError,
    Client,
    Finished,
    RetryOptions,
    Tokens,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from legato.cluster.client import Result
    from legato.cluster.router import Router

NUM_STREAMS, NUM_TOKENS = 20, 40


@dataclass
class TwoRouters:
    """Each behind a cable that can be cut."""

    service: Service
    other: Router
    cables: list[TcpProxy]

    @property
    def routers(self) -> list[Router]:
        return [self.service.router, self.other]

    @property
    def address(self) -> str:
        return ",".join(cable.address for cable in self.cables)

    def num_in_flight(self) -> list[int]:
        return [router.num_in_flight for router in self.routers]


@asynccontextmanager
async def two_routers(**decode: Any) -> AsyncIterator[TwoRouters]:  # noqa: ANN401
    settings = {"step_s": 0.02, "total_blocks": 4096, **decode}
    workers = [FakeWorker("prefill", total_blocks=4096)], [FakeWorker("decode", **settings)]
    async with (
        Service(*workers) as service,
        another_router(service) as (other, address),
        TcpProxy(service.address) as first,
        TcpProxy(address) as second,
    ):
        yield TwoRouters(service, other, [first, second])
        await service.settle()
        await until(lambda: other.num_in_flight == 0)


def check(result: Result, prompt: str) -> None:
    assert result.token_ids == expected(prompt, NUM_TOKENS), "a token is lost, doubled or another"
    assert result.text == text_of(result.token_ids)
    assert result.answers[0].finish_reason == "length"
    assert result.answers[0].finish.usage.completion_tokens == NUM_TOKENS


async def run_streams(client: AsyncClient, strike: asyncio.Future[None]) -> list[int]:
    """All of them whole; how many calls each needed. `strike` is done when all are under way."""
    num_begun = 0

    async def one(number: int) -> int:
        nonlocal num_begun
        prompt = f"prompt {number}"
        stream = client.stream(prompt, timeout_s=60, max_tokens=NUM_TOKENS, seed=SEED)
        ids: list[int] = []
        text = ""
        num_finished = 0
        async for event in stream:
            if isinstance(event, Finished):
                num_finished += 1
                continue
            assert event.token_offset == len(ids)
            num_begun += not ids
            ids += event.token_ids
            text += event.text
            if num_begun == NUM_STREAMS and not strike.done():
                strike.set_result(None)
        assert num_finished == 1
        assert ids == expected(prompt, NUM_TOKENS)
        assert text == text_of(ids)
        return stream.num_attempts

    return list(await asyncio.gather(*(one(number) for number in range(NUM_STREAMS))))


def check_moved(num_attempts: list[int]) -> None:
    """Else nothing was tested."""
    moved = sum(count > 1 for count in num_attempts)
    assert moved >= NUM_STREAMS // 4, f"only {moved} streams were cut"
    assert max(num_attempts) <= 3


@pytest.mark.parametrize("how", ["reset", "stopped", "frozen", "drained"])
async def test_a_router_is_lost_and_no_stream_is(how: str) -> None:
    async with two_routers() as two, AsyncClient(two.address) as client:
        strike: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(run_streams(client, strike))
        await strike
        assert min(two.num_in_flight()) > 0, "both serve"
        struck_at_s = time.monotonic()
        if how == "reset":
            two.cables[0].cut()
        elif how == "frozen":
            two.cables[0].freeze()
        elif how == "stopped":
            server = two.service.router._gateway._server
            assert server is not None
            await server.stop(grace=None)
        else:
            await two.service.router.drain(0.0)
        check_moved(await running)
        assert time.monotonic() - struck_at_s < 15
        result = await client.generate("after", max_tokens=NUM_TOKENS, seed=SEED, timeout_s=20)
        check(result, "after")
        two.cables[0].thaw()
        two.cables[0].cut()


async def test_a_service_that_is_ended_on_purpose_ends_its_streams_at_once() -> None:
    """Whether it has one router or two, and whoever asks: 60 s are for one that may come back."""
    async with two_routers() as two:

        def blocking(address: str) -> tuple[str, float]:
            with Client(address) as client:
                stream = client.stream("hello", max_tokens=1000, timeout_s=100)
                next(stream)
                begun.release()
                with pytest.raises(CallFailedError, match="shutting down") as raised:
                    stream.result()
                return raised.value.reason, time.monotonic()

        async def waiting(address: str) -> tuple[str, float]:
            async with AsyncClient(address) as client:
                stream = client.stream("hello", max_tokens=1000, timeout_s=100)
                await anext(stream)
                begun.release()
                with pytest.raises(CallFailedError, match="shutting down") as raised:
                    await stream.result()
                return raised.value.reason, time.monotonic()

        begun = threading.Semaphore(0)
        addresses = [two.cables[0].address, two.address]
        readers = [asyncio.create_task(waiting(address)) for address in addresses]
        readers += [
            asyncio.create_task(asyncio.to_thread(blocking, address)) for address in addresses
        ]
        for _ in readers:
            await asyncio.to_thread(begun.acquire)
        # As the owner does it: drained alike, and the port of an idle one is closed at once.
        ended_at_s = time.monotonic()
        await asyncio.gather(*(router.stop() for router in two.routers))
        told = await asyncio.gather(*readers)
        assert {reason for reason, _ in told} == {"SHUTTING_DOWN"}
        assert max(at_s for _, at_s in told) - ended_at_s < 10


async def test_the_only_router_is_lost_for_a_while() -> None:
    async with two_routers() as two, AsyncClient(two.cables[0].address) as client:
        strike: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(run_streams(client, strike))
        await strike
        two.cables[0].reset()
        await until(lambda: two.num_in_flight()[0] < NUM_STREAMS)
        two.cables[0].reset()  # also those that came back at once
        check_moved(await running)


async def test_of_the_same_router_a_stream_is_taken_over_that_it_still_serves() -> None:
    """The client sees its connection break, and the router, behind a frozen cable, does not."""
    async with two_routers() as two:
        router = two.service.router
        async with AsyncClient([two.cables[0].address, two.service.address]) as client:
            stream = client.stream("hello", max_tokens=200, seed=SEED, timeout_s=60)
            await anext(stream)
            assert router.num_in_flight == 1
            two.cables[0].freeze()
            result = await stream.result()
        assert stream.num_attempts == 2
        assert result.token_ids == expected("hello", 200)[1:]
        assert router.counters.cancelled == 1
        two.cables[0].thaw()
        two.cables[0].cut()


async def test_the_blocking_client_loses_nothing_either() -> None:
    async with two_routers() as two:

        def run() -> None:
            with Client(two.address) as client:
                streams = [
                    client.stream(f"prompt {i}", max_tokens=NUM_TOKENS, seed=SEED, timeout_s=60)
                    for i in range(4)
                ]
                heads = [next(stream) for stream in streams]
                loop.call_soon_threadsafe(two.cables[0].cut)
                for number, (stream, head) in enumerate(zip(streams, heads, strict=True)):
                    assert isinstance(head, Tokens)
                    rest = stream.result()
                    ids = [*head.token_ids, *rest.token_ids]
                    assert ids == expected(f"prompt {number}", NUM_TOKENS)
                assert sorted(stream.num_attempts for stream in streams) == [1, 1, 2, 2]
                check(client.generate("x", max_tokens=NUM_TOKENS, seed=SEED, timeout_s=60), "x")

        loop = asyncio.get_running_loop()
        await asyncio.to_thread(run)


async def test_several_answers_and_their_logprobs_are_collected() -> None:
    async with two_routers(step_s=0.0) as two, AsyncClient(two.address) as client:
        result = await client.generate("hello", n=3, max_tokens=5, seed=SEED, logprobs=1)
        for index, answer in enumerate(result.answers):
            assert answer.token_ids == expected("hello", 5, index)
            assert [entry.logprob for entry in answer.logprobs] == [-float(i) for i in range(5)]
            assert answer.finish.usage.seed == SEED + index
        assert result.text == result.answers[0].text
        assert len(result.request_id) == 32


# --- refusals ---------------------------------------------------------------------------------


async def test_a_full_queue_is_asked_again_when_it_says() -> None:
    prefills = [FakeWorker("prefill", total_blocks=8)]
    decodes = [FakeWorker("decode", total_blocks=8, step_s=0.02)]
    async with Service(prefills, decodes, max_queued_requests=1) as service:
        async with AsyncClient(service.address) as client:

            async def one(name: str) -> int:
                stream = client.stream(name * 20, max_tokens=12, seed=SEED, timeout_s=30)
                assert (await stream.result()).token_ids == expected(name * 20, 12)
                return stream.num_attempts

            counts = await asyncio.gather(*(one(name) for name in "abcdef"))
        assert max(counts) > 1
        assert service.router.counters.refused == sum(counts) - len(counts)
        assert service.router.counters.completed == len(counts)
        await service.settle()


async def test_what_is_wrong_is_told_at_once() -> None:
    async with two_routers() as two, AsyncClient(two.address) as client:
        stream = client.stream("x" * 400, max_tokens=20_000)
        with pytest.raises(CallFailedError, match="INVALID_ARGUMENT: prompt ") as raised:
            await stream.result()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert raised.value.request_id == stream.request_id
        assert stream.num_attempts == 1


async def test_nobody_there_is_told_after_the_longest_outage() -> None:
    async with TcpProxy("127.0.0.1:1") as nobody:
        address = nobody.address
    retry = RetryOptions(first_backoff_s=0.05, max_outage_s=0.5)
    started_s = time.monotonic()
    async with AsyncClient(address, retry=retry) as client:
        stream = client.stream("hello", timeout_s=60)
        with pytest.raises(CallFailedError) as raised:
            await stream.result()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert stream.num_attempts > 2
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await client.status()
        with pytest.raises(TimeoutError):
            await client.wait_ready(0.2)
    assert time.monotonic() - started_s < 20

    def blocking() -> None:
        with Client(address, retry=retry) as client:
            with pytest.raises(CallFailedError, match="UNAVAILABLE"):
                client.generate("hello", timeout_s=60)
            with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                client.status()
            with pytest.raises(TimeoutError):
                client.wait_ready(0.2)

    await asyncio.to_thread(blocking)


async def test_other_calls_go_to_a_router_that_is_there() -> None:
    async with two_routers() as two:
        two.cables[0].cut()
        async with AsyncClient(two.address) as client:
            for _ in range(3):
                assert (await client.model()).fingerprint == "f1"
                assert (await client.status()).ready
            assert (await client.scale({"decode": 2}))["decode"] == 2
            await client.wait_ready(5)

        def blocking() -> None:
            with Client(two.address) as client:
                for _ in range(3):
                    assert client.model().fingerprint == "f1"
                client.wait_ready(5)

        await asyncio.to_thread(blocking)


# --- deadlines and cancels --------------------------------------------------------------------


async def test_a_deadline_frees_the_workers_and_says_how_far_it_came() -> None:
    async with two_routers() as two, AsyncClient(two.address) as client:
        stream = client.stream("hello", max_tokens=1000, timeout_s=0.6)
        num_tokens = 0

        async def read() -> None:
            nonlocal num_tokens
            async for event in stream:
                num_tokens += len(event.token_ids) if isinstance(event, Tokens) else 0

        with pytest.raises(CallFailedError) as raised:
            await read()
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert num_tokens > 0
        assert f"(tokens until then: {num_tokens})" in raised.value.details()
        await two.service.settle()


async def test_the_deadline_goes_on_while_the_stream_moves() -> None:
    async with two_routers() as two, AsyncClient(two.address) as client:
        started_s = time.monotonic()
        stream = client.stream("hello", max_tokens=3000, timeout_s=1.5)
        reading = asyncio.create_task(stream.result())
        await until(lambda: two.service.decodes[0].num_tokens_sent > 20)
        for cable in two.cables:
            cable.reset()
        with pytest.raises(CallFailedError, match=r"the deadline of 1\.5 s passed"):
            await reading
        assert 1.4 < time.monotonic() - started_s < 10
        assert stream.num_attempts >= 2


async def test_cancelling_a_task_frees_the_workers() -> None:
    async with two_routers() as two, AsyncClient(two.address) as client:
        task = asyncio.create_task(client.generate("hello", max_tokens=1000))
        await until(lambda: sum(two.num_in_flight()) == 1)
        await until(lambda: two.service.decodes[0].num_tokens_sent > 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await two.service.settle()
        await until(lambda: sum(router.counters.cancelled for router in two.routers) == 1)


async def begun(client: AsyncClient) -> AsyncStream:
    stream = client.stream("hello", max_tokens=1000)
    await anext(stream)
    return stream


async def test_every_other_end_frees_the_workers_too() -> None:
    async with two_routers() as two, AsyncClient(two.address) as client:
        stream = await begun(client)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await two.service.settle()

        stream = await begun(client)
        reading = asyncio.create_task(stream.result())
        await asyncio.sleep(0.05)
        stream.cancel()
        with pytest.raises(CallFailedError, match="CANCELLED: cancelled by its client"):
            await reading
        await two.service.settle()

        async with await begun(client) as stream:
            pass
        await two.service.settle()

        stream = await begun(client)
        reading = asyncio.create_task(stream.result())
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(CallFailedError, match="CANCELLED: the client is closed"):
            await reading
        await two.service.settle()
        with pytest.raises(CallFailedError, match="the client is closed"):
            await client.generate("hello")


async def test_a_stream_that_is_dropped_is_cancelled() -> None:
    async with two_routers() as two, AsyncClient(two.address) as client:
        gc.disable()  # references alone must do it
        try:
            async for _ in client.stream("hello", max_tokens=1000):
                break
            await two.service.settle()

            def run() -> None:
                with Client(two.address) as blocking:
                    for _ in blocking.stream("hello", max_tokens=1000):
                        break
                    held.wait(10)

            held = threading.Event()
            running = asyncio.create_task(asyncio.to_thread(run))
            await until(lambda: len(two.service.decodes[0].reserves) == 2)
            await two.service.settle()
            held.set()
            await running
        finally:
            gc.enable()


async def test_a_stream_is_cancelled_while_it_waits_to_be_tried_again() -> None:
    async with TcpProxy("127.0.0.1:1") as nobody:
        address = nobody.address
    retry = RetryOptions(first_backoff_s=30.0, max_backoff_s=30.0, max_outage_s=600.0)
    async with AsyncClient(address, retry=retry) as client:
        stream = client.stream("hello")
        reading = asyncio.create_task(stream.result())
        await until(lambda: stream.num_attempts == 1)
        await asyncio.sleep(0.2)
        stream.cancel()
        with pytest.raises(CallFailedError, match="cancelled by its client"):
            await asyncio.wait_for(reading, 5)

    def blocking() -> None:
        with Client(address, retry=retry) as client:
            stream = client.stream("hello")
            threading.Timer(0.3, stream.cancel).start()
            with pytest.raises(CallFailedError, match="cancelled by its client"):
                stream.result()

    await asyncio.wait_for(asyncio.to_thread(blocking), 10)


async def test_blocking_streams_are_cancelled_from_another_thread() -> None:
    async with two_routers() as two:

        def run() -> None:
            with Client(two.address) as client:
                stream = client.stream("hello", max_tokens=1000)
                next(stream)
                threading.Timer(0.1, stream.cancel).start()
                with pytest.raises(CallFailedError, match="cancelled by its client") as raised:
                    stream.result()
                assert raised.value.code() is grpc.StatusCode.CANCELLED
                with client.stream("hello", max_tokens=1000) as stream:
                    next(stream)
                stream = client.stream("hello", max_tokens=1000)
                next(stream)
            with pytest.raises(CallFailedError, match="the client is closed"):
                stream.result()

        await asyncio.to_thread(run)
        await two.service.settle()
