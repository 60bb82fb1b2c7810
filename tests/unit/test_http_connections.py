"""The HTTP endpoint's connections: clients that leave, deadlines, drains, ports, credentials."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

import httpx2
import pytest
from fake_worker import FakeWorker
from http_service import CHAT, TEXT, asked, http_service
from one_token import one_token
from router_service import FakeControl, Service, ask, collect, fake_router, until

from legato.cluster.config import RouterOptions
from legato.cluster.http import idle_connections
from legato.cluster.http import server as http_server
from legato.cluster.http.rare_lines import RareLines
from legato.cluster.http.server import HttpServer
from legato.cluster.strict_json import parse_json

if TYPE_CHECKING:
    from http_service import HttpService

GONE_BOUND_S = 2.0  # fake steps take milliseconds; the rest is a busy machine's
LONG = "a" * 20  # 6 of 8 blocks, to begin with
SLOW = {"step_s": 0.02, "total_blocks": 4000}


async def open_stream(
    service: HttpService, max_tokens: int = 400, **fields: object
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection, of which the first event has come."""
    host, port = service.service.router.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(asked(max_tokens, stream=True, **fields)).encode()
    writer.write(
        f"POST {TEXT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    async with asyncio.timeout(10):
        while not (await reader.readline()).startswith(b"data:"):
            pass
    return reader, writer


async def settled_within(service: HttpService, bound_s: float) -> None:
    began_s = time.monotonic()
    await service.service.settle()
    assert time.monotonic() - began_s < bound_s


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_leaves_frees_everything(how: str) -> None:
    async with http_service(decode=FakeWorker("decode", **SLOW)) as service:
        _, writer = await open_stream(service, prompt="hello", n=3)
        assert service.service.decodes[0].used_blocks > 0
        if how == "reset":
            taken = writer.get_extra_info("socket")
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.close()
        await settled_within(service, GONE_BOUND_S)
        assert service.service.router.counters.cancelled == 1


async def test_all_prompts_of_a_client_that_leaves_end() -> None:
    async with http_service(decode=FakeWorker("decode", **SLOW)) as service:
        _, writer = await open_stream(service, prompt=["one", "two", "three"])
        await until(lambda: service.service.router.num_in_flight == 3)
        writer.close()
        await settled_within(service, GONE_BOUND_S)
        assert service.service.router.counters.cancelled == 3


async def test_a_client_that_leaves_before_its_whole_answer_frees_everything() -> None:
    async with http_service(decode=FakeWorker("decode", **SLOW)) as service:
        asking = asyncio.create_task(service.post(TEXT, **asked(400, prompt="hello")))
        await until(lambda: service.service.decodes[0].used_blocks > 0)
        asking.cancel()
        await asyncio.wait({asking})
        await settled_within(service, GONE_BOUND_S)


@pytest.mark.parametrize("path", [TEXT, CHAT, "/page/chat"])
async def test_a_client_that_leaves_within_its_body_is_nobodys_fault(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with http_service() as service:
        host, port = service.service.router.http_address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            'content-length: 100\r\n\r\n{"prompt"'.encode()
        )
        await writer.drain()
        await asyncio.sleep(0.1)  # the body is being read
        writer.close()
        await asyncio.sleep(0.1)
        assert (await service.post(TEXT, **asked(1, prompt="hello"))).status_code == 200
    assert caplog.records == []


async def test_what_is_refused_of_a_body_is_counted_as_over_grpc() -> None:
    async with http_service() as service:
        wrong = (
            (TEXT, asked(1, prompt="a", such_a_field=1), 400),
            (TEXT, asked(1, prompt="a", temperature="1"), 400),
            (TEXT, asked(100_000, prompt="a"), 400),  # by a rule of the router's
            (TEXT, asked(1, prompt="a", model="other"), 404),
            (CHAT, asked(1, messages=[]), 400),
            (CHAT, asked(1, messages=[{"role": "user", "content": "a"}], tools=[{}]), 400),
            ("/page/chat", {"messages": 3}, 400),
        )
        router = service.service.router
        for path, fields, status in wrong:
            assert (await service.post(path, **fields)).status_code == status
        assert router.counters.refused == len(wrong)
        assert (await service.post(TEXT, **asked(1, prompt="hello"))).status_code == 200
        told = (await service.http.get("/metrics")).text
    refused = f'{{outcome="refused",priority="interactive"}} {len(wrong):.1f}'
    assert f"legato_requests_total{refused}" in told
    assert 'legato_refusals_total{reason="invalid_field"} 6.0' in told
    assert 'legato_refusals_total{reason="unknown_field"} 1.0' in told
    assert 'legato_requests_total{outcome="completed",priority="interactive"} 1.0' in told


async def test_what_is_no_http_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async with http_service() as service:
        host, port = service.service.router.http_address.split(":")
        for _ in range(20):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"\x80\x04\x95 no request\r\n\r\n")
            assert b" 400 " in await asyncio.wait_for(reader.readline(), 5)
            writer.close()
    assert len([r for r in caplog.records if r.name == "uvicorn.error"]) <= 2


def test_of_a_message_there_is_a_line_in_a_while_with_how_many_were_left_out() -> None:
    now_s = [0.0]
    lines = RareLines(now=lambda: now_s[0])

    def written(text: str, level: int = logging.WARNING) -> str | None:
        record = logging.LogRecord("a", level, "", 0, text, None, None)
        return record.getMessage() if lines.filter(record) else None

    assert [written("a"), written("a"), written("b"), written("a")] == ["a", None, "b", None]
    assert [written("a", logging.ERROR)] * 2 == ["a", "a"]
    now_s[0] = 10.0
    assert [written("a"), written("a"), written("b")] == [
        "a (2 more since the last such line)",
        None,
        "b",
    ]
    now_s[0] = 20.0
    assert written("a") == "a (1 more since the last such line)"


@pytest.mark.parametrize("path", [TEXT, CHAT, "/page/chat"])
async def test_a_large_body_is_read_beside_the_event_loop(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a million ids, or of a hundred thousand keys, it takes half a second of a processor.
    on_loop = []

    def note(body: bytes, what: str) -> object:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return parse_json(body, what)

    monkeypatch.setattr("legato.cluster.http.request_body.parse_json", note)
    async with http_service(prefill=FakeWorker("prefill", total_blocks=400)) as service:
        for size in (10, 70_000):
            content = [{"role": "user", "content": "a" * size}]
            fields = {"prompt": "a" * size} if path == TEXT else {"messages": content}
            response = await service.post(path, max_tokens=2, **fields)
            assert response.status_code == (200 if size == 10 else 400), response.text
    assert on_loop == [True, False]


async def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    async with http_service(decode=FakeWorker("decode", step_s=0.02, total_blocks=8)) as service:
        _, first = await open_stream(service, 12, prompt=LONG)
        waiting = asyncio.create_task(service.post(TEXT, **asked(12, prompt=LONG)))
        await until(lambda: service.service.router.admission.num_queued == 1)
        waiting.cancel()
        await until(lambda: service.service.router.admission.num_queued == 0)
        first.close()


async def test_a_slow_reader_holds_its_own_stream_and_no_other() -> None:
    async with http_service(decode=FakeWorker("decode", total_blocks=4000)) as service:
        _, writer = await open_stream(service, prompt="hello", n=2)
        result = await collect(service.service, ask("you", 5))
        assert len(result.token_ids) == 5
        writer.close()


async def test_the_deadline_of_a_header_is_the_requests() -> None:
    async with http_service(decode=FakeWorker("decode", **SLOW)) as service:
        response = await service.http.post(
            CHAT,
            json=asked(400, messages=[{"role": "user", "content": "hello"}]),
            headers={"x-request-timeout-s": "0.3"},
        )
        assert response.status_code == 504
        error = response.json()["error"]
        assert error["type"] == "timeout_error"
        assert "0.3 s passed" in error["message"]
    # Another: this one has learnt that so much takes longer.
    async with http_service(decode=FakeWorker("decode", **SLOW)) as service:
        response = await service.http.post(
            TEXT,
            json=asked(400, prompt="hello", stream=True),
            headers={"x-request-timeout-s": "0.3"},
        )
        assert response.status_code == 200  # its first tokens had been sent
        *_, error_event, done, _ = response.text.split("\n\n")
        assert json.loads(error_event.removeprefix("data: "))["error"]["type"] == "timeout_error"
        assert done == "data: [DONE]"


async def test_request_ids_find_a_request_and_never_clash() -> None:
    async with http_service(decode=FakeWorker("decode", **SLOW)) as service:
        headers = {"x-request-id": "mine"}
        responses = await asyncio.gather(
            *(
                service.http.post(TEXT, json=asked(5, prompt="hello"), headers=headers)
                for _ in range(3)
            )
        )
        ids = {response.json()["id"] for response in responses}
        assert len(ids) == 3
        assert all(name.startswith("cmpl-mine-") for name in ids)
        assert {response.headers["x-request-id"] for response in responses} == {"mine"}
        used = {reserve.key.request_id for reserve in service.service.decodes[0].reserves}
        assert {f"cmpl-{name}" for name in used} == ids


async def test_health_and_refusals_follow_the_workers() -> None:
    async with Service([FakeWorker("prefill")], [], http_port=0) as service:
        url = f"http://{service.router.http_address}"
        async with httpx2.AsyncClient(base_url=url, trust_env=False) as http:
            response = await http.get("/health")
            assert response.status_code == 503
            assert "no ready worker" in response.json()["reason"]
            assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] is None
            response = await http.post(TEXT, json=asked(3, prompt="hello"))
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            decode = FakeWorker("decode")
            service.decodes.append(decode)
            await service.router.set_workers([*service.endpoints, await decode.start()])
            await service.client.wait_ready(5)
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == 512
            assert (await http.post(TEXT, json=asked(3, prompt="hello"))).status_code == 200


async def test_a_full_queue_says_when_to_ask_again() -> None:
    decode = FakeWorker("decode", step_s=0.02, total_blocks=8)
    async with http_service(decode=decode, max_queued_requests=1) as service:
        asking = [
            asyncio.create_task(service.post(TEXT, **asked(12, prompt=LONG))) for _ in range(6)
        ]
        done, running = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        refused = done.pop().result()
        assert refused.status_code == 429
        assert float(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        for task in running:
            task.cancel()
        await asyncio.wait(asking)


async def test_a_drain_lets_streams_finish_and_refuses_new_ones() -> None:
    async with http_service(decode=FakeWorker("decode", step_s=0.02)) as service:
        running = asyncio.create_task(service.post(TEXT, **asked(20, prompt="hello")))
        await until(lambda: service.service.decodes[0].used_blocks > 0)
        draining = asyncio.create_task(service.service.router.drain(10))
        await asyncio.sleep(0)
        response = await service.post(TEXT, **asked(3, prompt="hello"))
        assert response.status_code == 503
        assert "shutting down" in response.json()["error"]["message"]
        assert (await service.http.get("/health")).status_code == 503
        assert (await running).status_code == 200
        await draining


async def test_a_stop_is_bounded_and_closes_the_port() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode", **SLOW)], http_port=0) as s:
        host, port = s.router.http_address.split(":")
        url = f"http://{s.router.http_address}"
        idle = await asyncio.open_connection(host, int(port))
        async with httpx2.AsyncClient(base_url=url, trust_env=False) as http:
            running = asyncio.create_task(http.post(TEXT, json=asked(400, prompt="hello")))
            await until(lambda: s.decodes[0].used_blocks > 0)
            began_s = time.monotonic()
            await s.router.stop()
            assert time.monotonic() - began_s < 10
            response = await running
        assert response.status_code == 503
        assert "cut short" in response.json()["error"]["message"]
        idle[1].close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))


async def test_a_taken_port_fails_the_start_and_leaves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        router = fake_router(RouterOptions(port=0, http_port=port), FakeControl())
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port} for HTTP: the port"):
            await router.start()
    # The other way round: HTTP has its port when gRPC's turns out to be taken.
    async with Service([], []) as other:
        grpc_port = int(other.address.rpartition(":")[2])
        router = fake_router(RouterOptions(port=grpc_port, http_port=port), FakeControl())
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{grpc_port}"):
            await router.start()
        socket.create_server(("127.0.0.1", port)).close()


async def test_two_servers_never_share_a_port() -> None:
    async with http_service() as service:
        port = int(service.service.router.http_address.rpartition(":")[2])
        with pytest.raises(OSError, match="the port is taken by another process"):
            HttpServer(service.service.router, "127.0.0.1", port)


async def test_connections_that_never_ask_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_connections, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(http_server, "IDLE_CHECK_S", 0.05)
    async with http_service(decode=FakeWorker("decode", step_s=0.05)) as service:
        host, port = service.service.router.http_address.split(":")
        silent = await asyncio.open_connection(host, int(port))
        slow = await asyncio.open_connection(host, int(port))
        slow[1].write(b"POST /v1/completions HTTP/1.1\r\nhost:")
        answer = await service.post(TEXT, **asked(20, prompt="hello"))  # a second: it is left alone
        assert answer.status_code == 200
        async with asyncio.timeout(5):
            for reader, writer in (silent, slow):
                with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
                writer.close()
        # Between its requests a client may be silent for longer.
        assert (await service.post(TEXT, **asked(2, prompt="hello"))).status_code == 200


async def test_idle_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent ones and such as have been served: the oldest go, who asks is answered."""
    monkeypatch.setattr(http_server, "IDLE_CHECK_S", 0.05)
    worker = FakeWorker("decode", step_s=0.05)
    async with http_service(decode=worker) as service, AsyncExitStack() as opened:
        server = HttpServer(service.service.router, "127.0.0.1", 0, most_idle_connections=50)
        await server.start()
        opened.push_async_callback(server.stop)
        host, port = server.address.split(":")
        http = await opened.enter_async_context(
            httpx2.AsyncClient(base_url=f"http://{server.address}", trust_env=False)
        )
        running = asyncio.create_task(http.post(TEXT, json=asked(30, prompt="hello")))
        await asyncio.sleep(0.1)
        readers, waits_s = [], []
        for number in range(300):
            reader, writer = await asyncio.open_connection(host, int(port))
            opened.callback(writer.close)
            if number % 2:
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            readers.append(reader)
            if number % 30 == 0:
                begun_s = time.monotonic()
                assert (await http.get("/health")).status_code == 200
                waits_s.append(time.monotonic() - begun_s)
        assert (await running).status_code == 200, "a connection with a request is not idle"

        async def num_open() -> int:
            ended = 0
            for reader in readers:
                with suppress(TimeoutError, ConnectionError):
                    async with asyncio.timeout(0.001):
                        while await reader.read(4096):
                            pass
                ended += reader.at_eof() or reader.exception() is not None
            return len(readers) - ended

        for _ in range(20):
            if (left := await num_open()) <= 50:
                break
            await asyncio.sleep(0.1)
        assert 40 < left <= 50, "all beyond the bound go, and no more than must"
        assert max(waits_s) < 1


async def test_only_health_is_open_to_who_shows_nothing() -> None:
    async with http_service() as service:
        server = HttpServer(service.service.router, "127.0.0.1", 0, authorize=one_token("right"))
        await server.start()
        try:
            url = f"http://{server.address}"
            async with httpx2.AsyncClient(base_url=url, trust_env=False) as http:
                routes = (await http.get("/openapi.json", headers=bearer("right"))).json()["paths"]
                assert {TEXT, CHAT, "/health", "/v1/models"} <= routes.keys()
                open_routes = set()
                others = {path: {"get": {}} for path in ("/", "/openapi.json", "/x")}
                for path, methods in (routes | others).items():
                    for method in methods:
                        for headers in ({}, bearer("wrong"), {"authorization": "right"}):
                            response = await http.request(method, path, headers=headers)
                            if response.status_code == 401:
                                assert response.headers["www-authenticate"] == "Bearer"
                                error = response.json()["error"]
                                assert error["type"] == "authentication_error"
                            else:
                                open_routes.add(path)
                assert open_routes == {"/health", "/"}  # the page itself tells nothing
                response = await http.post(
                    TEXT, json=asked(2, prompt="hello"), headers=bearer("right")
                )
                assert response.status_code == 200
        finally:
            await server.stop()


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_where_all_connections_have_requests_a_new_one_is_told_so() -> None:
    worker = FakeWorker("decode", **SLOW)
    async with http_service(decode=worker) as service, AsyncExitStack() as opened:
        server = HttpServer(service.service.router, "127.0.0.1", 0, most_connections=3)
        await server.start()
        opened.push_async_callback(server.stop)
        clients = [
            await opened.enter_async_context(
                httpx2.AsyncClient(base_url=f"http://{server.address}", trust_env=False)
            )
            for _ in range(4)
        ]
        running = [
            asyncio.create_task(http.post(TEXT, json=asked(100, prompt="hello")))
            for http in clients[:3]
        ]
        await until(lambda: service.service.router.num_in_flight == 3)
        refused = await clients[3].get("/health")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        assert refused.json()["error"]["type"] == "service_unavailable_error"
        assert "all 3 connections of this router have requests" in refused.text
        for task in running:
            assert (await task).status_code == 200, "those with requests stay"
        # Their connections are idle now, and the longest idle ones go for a new one.
        assert (await clients[3].get("/health")).status_code == 200
