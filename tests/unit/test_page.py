"""The live page's file and the routes that feed it, over fake workers."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from fake_worker import FakeWorker
from one_token import one_token
from router_service import Service, ask, collect, until

from legato.cluster.http.server import HttpServer
from legato.cluster.metrics import history
from legato.cluster.metrics.history import quantile
from legato.cluster.page import routes
from legato.cluster.page.routes import PAGE, page_headers
from legato.protos import cluster_pb2, common_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HTML = PAGE.read_text()
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "PERIOD_S", 0.05)
    monkeypatch.setattr(history, "PERIOD_S", 0.05)


@asynccontextmanager
async def client_of(service: Service) -> AsyncIterator[httpx2.AsyncClient]:
    url = f"http://{service.router.http_address}"
    async with httpx2.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
        yield client


def served(*decodes: FakeWorker, **options: Any) -> Service:  # noqa: ANN401  # RouterOptions'
    return Service([FakeWorker("prefill")], decodes, http_port=0, **options)


async def events(response: httpx2.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def next_state(client: httpx2.AsyncClient) -> Any:  # noqa: ANN401  # JSON
    async with client.stream("GET", "/page/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        seen = []
        async for name, value in events(response):
            seen.append(name)
            if name == "state":
                assert seen == ["history", "state"]
                return value
    raise AssertionError("no state came")


class Tags(HTMLParser):
    """All tags with their attributes, and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_file_is_whole_and_asks_nobody_else() -> None:
    parser = Tags()
    parser.feed(HTML)
    assert parser.open == [], "a tag is left open"
    for tag, attributes in parser.tags:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        assert "style" not in attributes, "the policy would drop it"
        assert attributes.get("src") is None
        assert attributes.get("href") in (None, "data:,")
    urls = re.findall(r"https?://[^\"' ]+", HTML)
    assert urls == ["http://www.w3.org/2000/svg"], "a name, which nobody fetches"
    assert len(HTML.encode()) < 64 * 1024


def test_nothing_of_the_service_can_become_markup() -> None:
    script = re.search(r"<script>(.*?)</script>", HTML, flags=re.DOTALL)
    assert script is not None
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
    ):
        assert way not in script[1]
    assert '"style"' not in script[1]


def test_ids_are_unique_those_in_the_script_exist_and_every_field_has_a_label() -> None:
    parser = Tags()
    parser.feed(HTML)
    ids = [a["id"] for _, a in parser.tags if "id" in a]
    assert len(ids) == len({*ids})
    assert set(re.findall(r'\$\("([a-z]+)"\)', HTML)) <= {*ids}
    labelled = {a["for"] for tag, a in parser.tags if tag == "label" and "for" in a}
    wrapped = set(re.findall(r"<label[^>]*>[^<]*<input id=\"(\w+)\"", HTML))
    fields = {a["id"] for tag, a in parser.tags if tag in ("input", "textarea")}
    assert fields == labelled | wrapped
    assert ("html", {"lang": "en"}) in parser.tags
    assert any(a.get("name") == "viewport" for _, a in parser.tags)


async def test_the_page_comes_with_a_policy_that_allows_its_own_script_alone() -> None:
    async with served(FakeWorker("decode")) as service, client_of(service) as client:
        response = await client.get("/")
    assert response.text == HTML
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy == page_headers(HTML)["content-security-policy"]
    assert policy != page_headers(HTML.replace("Legato:", "legato:"))["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_the_state_has_pools_workers_and_what_the_controller_told() -> None:
    decode = FakeWorker("decode")
    async with served(decode, reports_load=True) as service, client_of(service) as client:
        role = common_pb2.WORKER_ROLE_DECODE
        starting = cluster_pb2.WorkerStatus(
            worker_id=EVIL, role=role, phase=common_pb2.WORKER_PHASE_STARTING
        )
        service.control.told = [
            cluster_pb2.PoolStatus(role=role, target=2, message="one starts", workers=[starting])
        ]
        decision = cluster_pb2.ScalingDecision(age_s=3, text="decode 1 -> 2: KV is short")
        service.control.autoscaler_told = cluster_pb2.AutoscalerStatus(
            ttft_slo_s=0.5,
            pools=[cluster_pb2.AutoscaledPool(role=role, min_workers=1, max_workers=4, needed=2)],
            decisions=[decision],
        )
        await service.router.pool_poll.ask()
        await collect(service, ask("hello", 12))
        await until(lambda: bool(service.router.history.samples[-1].ttft_p50_s))
        state = await next_state(client)
    assert state["ready"] is True
    assert state["ended"]["completed"] == 1
    prefill, told = state["pools"]
    assert (prefill["role"], told["role"]) == ("prefill", "decode")
    assert (told["target"], told["message"]) == (2, "one starts")
    states = {worker["id"]: worker["state"] for worker in told["workers"]}
    assert states == {decode.worker_id: "ready", EVIL: "starting"}
    [known] = [w for w in told["workers"] if w["load"]]
    assert known["load"]["blocks"]["total"] == decode.total_blocks
    assert state["autoscaler"]["decisions"] == [{"age_s": 3.0, "text": decision.text}]
    assert state["autoscaler"]["pools"][0]["needed"] == 2
    assert state["sample"]["ttft_p90_s"] > 0
    assert state["sample"]["itl_p90_s"] > 0
    assert state["sample"]["tokens_s"] > 0


async def test_a_chat_tells_each_token_and_the_way_it_took() -> None:
    async with served(FakeWorker("decode", step_s=0.002)) as service, client_of(service) as client:
        body = {"messages": [{"role": "user", "content": EVIL}], "max_tokens": 9, "temperature": 0}
        async with client.stream("POST", "/page/chat", json=body) as response:
            told = [event async for event in events(response)]
        await service.settle()
    *tokens, (last, finish) = told
    assert last == "finish"
    assert {name for name, _ in tokens} == {"tokens"}
    assert sum(value["count"] for _, value in tokens) == 9
    times = [value["at_s"] for _, value in tokens]
    assert times == sorted(times)
    assert finish["reason"] == "length"
    assert finish["prompt_tokens"] == len(EVIL)
    phases = {part["name"]: part["s"] for part in finish["phases"]}
    assert [*phases] == ["queue", "ticket", "prefill", "handoff", "decode", "delivery"]
    assert sum(phases.values()) == pytest.approx(finish["total_s"])
    assert finish["kv_bytes_handed_over"] > 0
    assert finish["decode_worker"].startswith("decode-")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": True}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}, "temperature"),
        ({"messages": [{"role": "user", "content": "x"}], "top_q": 1}, "top_q"),
        ({"messages": [{"role": "user", "content": "x"}] * 1025}, "messages"),
    ],
)
async def test_a_wrong_question_is_refused_by_name(body: dict[str, Any], word: str) -> None:
    async with served(FakeWorker("decode")) as service, client_of(service) as client:
        response = await client.post("/page/chat", json=body)
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


async def test_a_page_of_another_origin_cannot_ask() -> None:
    async with served(FakeWorker("decode")) as service, client_of(service) as client:
        response = await client.post("/page/chat", content=b"{}")
        assert response.status_code == 415
        assert "access-control-allow-origin" not in response.headers


async def test_a_viewer_that_leaves_in_the_middle_frees_all() -> None:
    async with served(FakeWorker("decode", step_s=0.02)) as service, client_of(service) as client:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}
        async with client.stream("POST", "/page/chat", json=body) as response:
            async for name, _ in events(response):
                assert name == "tokens"
                break
        await service.settle()
        assert service.router.counters.cancelled == 1


async def test_the_number_of_viewers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_VIEWERS", 1)
    async with served(FakeWorker("decode")) as service, client_of(service) as client:
        async with client.stream("GET", "/page/events") as first:
            await anext(events(first))
            assert (await client.get("/page/events")).status_code == 503
        async with asyncio.timeout(5):  # the place is free again
            while True:
                async with client.stream("GET", "/page/events") as again:
                    if again.status_code == 200:
                        break
                await asyncio.sleep(0.02)


async def test_metrics_are_served_in_the_format_that_is_asked_for() -> None:
    async with served(FakeWorker("decode")) as service, client_of(service) as client:
        plain = await client.get("/metrics")
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        opened = await client.get("/metrics", headers=accept)
    assert plain.headers["content-type"].startswith("text/plain")
    assert "legato_ready 1.0" in plain.text
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    assert opened.text.endswith("# EOF\n")


async def test_without_credentials_only_the_empty_page_is_shown() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        server = HttpServer(service.router, "127.0.0.1", 0, authorize=one_token("good"))
        await server.start()
        try:
            url = f"http://{server.address}"
            async with httpx2.AsyncClient(base_url=url, trust_env=False) as client:
                assert (await client.get("/")).status_code == 200
                for path in ("/metrics", "/page/events"):
                    assert (await client.get(path)).status_code == 401, path
                assert (await client.post("/page/chat", json={})).status_code == 401
                good = {"authorization": "Bearer good"}
                assert (await client.get("/metrics", headers=good)).status_code == 200
        finally:
            await server.stop()


def test_a_quantile_lies_within_its_bucket() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, [0, 0, 0, 0], 0.5) is None
    assert quantile(bounds, [10, 0, 0, 0], 0.5) == 0.5
    assert quantile(bounds, [0, 10, 10, 0], 0.9) == pytest.approx(3.6)
    assert quantile(bounds, [0, 0, 0, 3], 0.5) == 4.0
