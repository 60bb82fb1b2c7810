"""The live page in a headless Chromium: what it shows, says to a keyboard, and never executes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import router_service
from browser import COMMAND, MODIFIER_CTRL, Browser
from fake_worker import FakeWorker
from one_token import one_token
from router_service import FakeAnswerText, FakeDelta, Service, ask, collect

from legato.cluster.http.server import HttpServer
from legato.protos import cluster_pb2, common_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(COMMAND is None, reason="Chromium is not installed"),
]

EVIL = "<img src=x onerror=\"document.title='hit'\"><b>bold</b>"
TAB, ENTER = ("Tab", 9), ("Enter", 13)
WIDTHS = {"desk": (1280, 900), "phone": (390, 844)}


class MarkupText(FakeAnswerText):
    """A model whose every token is markup."""

    def push(self, token_ids: Sequence[int]) -> FakeDelta:
        delta = super().push(token_ids)
        return FakeDelta("<i>t</i>" * len(token_ids), delta.num_tokens_consumed, delta.stop)


@asynccontextmanager
async def shown(width: str = "desk") -> AsyncIterator[tuple[Service, Browser]]:
    decodes = [FakeWorker("decode", step_s=0.005) for _ in range(2)]
    async with Service([FakeWorker("prefill")], decodes, http_port=0, reports_load=True) as service:
        role = common_pb2.WORKER_ROLE_DECODE
        starting = cluster_pb2.WorkerStatus(
            worker_id=EVIL, role=role, host=EVIL, phase=common_pb2.WORKER_PHASE_STARTING
        )
        service.control.told = [
            cluster_pb2.PoolStatus(role=role, target=3, message=EVIL, workers=[starting])
        ]
        service.control.autoscaler_told = cluster_pb2.AutoscalerStatus(
            pools=[cluster_pb2.AutoscaledPool(role=role, max_workers=4, needed=3, reason=EVIL)],
            decisions=[cluster_pb2.ScalingDecision(age_s=3, text=EVIL)],
        )
        await service.router.pool_poll.ask()
        async with Browser() as browser:
            await browser.open(f"http://{service.router.http_address}/", *WIDTHS[width])
            await browser.until("document.getElementById('ready').textContent === 'ready'")
            yield service, browser


async def test_pools_times_and_decisions_are_shown_and_follow() -> None:
    async with shown() as (service, browser):
        await asyncio.gather(*(collect(service, ask("hello", 40)) for _ in range(3)))
        await browser.until("document.querySelectorAll('#charts path').length >= 4")
        text = await browser.run("document.querySelector('main').innerText")
        for worker in service.workers:
            assert worker.worker_id in text
        assert "2 of 3 ready" in text
        assert await browser.run("document.querySelectorAll('.worker .bar').length") == 3
        await browser.until("document.getElementById('tiles').innerText.includes('3\\ncompleted')")
        lost = service.decodes[0]
        await lost.die()
        await browser.until("[...document.querySelectorAll('.badge.bad')].length > 0")
        assert browser.complaints == []


async def test_nothing_from_the_service_becomes_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_service, "FakeAnswerText", MarkupText)
    async with shown() as (_, browser):
        await browser.until("document.querySelector('#scaler li') !== null")
        await browser.run("document.getElementById('prompt').focus()")
        await browser.type(EVIL)
        await browser.press(*ENTER, modifiers=MODIFIER_CTRL)
        await browser.until("document.querySelector('#way table') !== null")
        text = await browser.run("document.querySelector('main').innerText")
        # Of worker, host, message, reason, decision and question; and of each token.
        assert text.count(EVIL) >= 6
        assert "<i>t</i><i>t</i>" in text
        assert (
            await browser.run("document.querySelectorAll('main img, main b:not(.tile b)').length")
            == 0
        )
        assert await browser.run("document.querySelectorAll('#log i').length") == 0
        assert await browser.run("document.title") == "Legato: fake-model"
        assert browser.complaints == []


async def test_the_policy_stops_what_would_get_in() -> None:
    async with shown() as (_, browser):
        script = (
            "new Promise(done => { document.addEventListener('securitypolicyviolation', "
            "e => done(e.violatedDirective)); const s = document.createElement('script'); "
            "s.textContent = 'window.hit = 1'; document.body.append(s); setTimeout(done, 5000); })"
        )
        assert (await browser.run(script)).startswith("script-src")
        assert await browser.run("window.hit === undefined")
        script = "fetch('https://example.invalid/').then(() => 'sent', e => e.name)"
        assert await browser.run(script) == "TypeError"


@pytest.mark.parametrize("width", WIDTHS)
async def test_it_fits_and_has_both_themes(width: str) -> None:
    async with shown(width) as (service, browser):
        await collect(service, ask("hello", 20))
        for theme in ("light", "dark"):
            await browser.run(f"theme('{theme}')")
            assert await browser.run("document.documentElement.scrollWidth <= window.innerWidth")
            # 4.5 is what WCAG asks of text.
            least = await browser.run(CONTRAST)
            assert least >= 4.5, theme
        assert len(await browser.screenshot()) > 10_000


# The least contrast of a text's colour with the card behind it.
CONTRAST = """(() => {
  const part = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (colour) => {
    const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map((v) => part(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const says = (n) => [...n.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim());
  const all = [...document.querySelectorAll("body *")];
  const texts = all.filter((n) => says(n) && n.offsetParent && !n.disabled);
  return Math.min(...texts.map((n) => {
    const pair = [light(getComputedStyle(n).color), light(behind(n))].sort((x, y) => y - x);
    return (pair[0] + 0.05) / (pair[1] + 0.05);
  }));
})()"""


async def test_a_keyboard_reaches_all_asks_and_stops() -> None:
    async with shown() as (service, browser):
        await browser.run("document.body.focus()")
        reached = []
        for _ in range(12):
            await browser.press(*TAB)
            reached.append(await browser.run("document.activeElement.id"))
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            if reached[-1]:
                assert await browser.run(outline) != "none", reached[-1]
        order = [name for name in reached if name]
        assert order[:7] == ["theme", "log", "prompt", "max", "temperature", "clear", "send"]
        await browser.run("document.getElementById('max').value = 200")
        await browser.run("document.getElementById('prompt').focus()")
        await browser.type("hello")
        await browser.press(*ENTER, modifiers=MODIFIER_CTRL)
        await browser.until("document.querySelectorAll('#log .turn span').length > 3")
        await browser.run("document.getElementById('stop').click()")
        await browser.until("document.getElementById('log').innerText.includes('stopped')")
        await service.settle()
        assert service.router.counters.cancelled == 1


async def test_an_answer_comes_with_its_way_and_each_tokens_time() -> None:
    async with shown() as (_, browser):
        await browser.run("document.getElementById('max').value = 20")
        await browser.run("document.getElementById('prompt').focus()")
        await browser.type("hello")
        await browser.press(*ENTER, modifiers=MODIFIER_CTRL)
        await browser.until("document.querySelector('#way table') !== null")
        way = await browser.run("document.getElementById('way').innerText")
        for phase in ("queue", "ticket", "prefill", "handoff", "decode", "delivery"):
            assert phase in way
        assert "20 tokens for 5" in way
        assert await browser.run("document.querySelectorAll('#way rect.gap').length") >= 10
        titles = await browser.run("[...document.querySelectorAll('#log span')].map(s => s.title)")
        assert all(title.startswith("+") for title in titles)
        said = await browser.run("document.getElementById('said').textContent")
        assert said.startswith("The answer is complete")
        assert browser.complaints == []


async def test_where_a_token_is_wanted_the_page_asks_for_it() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        server = HttpServer(service.router, "127.0.0.1", 0, authorize=one_token("good"))
        await server.start()
        try:
            async with Browser() as browser:
                await browser.open(f"http://{server.address}/", *WIDTHS["desk"])
                gate = "document.getElementById('gate').classList.contains('hidden')"
                await browser.until(f"!{gate}")
                await browser.run("document.getElementById('token').focus()")
                await browser.type("good")
                await browser.press(*ENTER)
                await browser.run("document.getElementById('gate').requestSubmit()")
                await browser.until("document.getElementById('ready').textContent === 'ready'")
                assert await browser.run(gate)
        finally:
            await server.stop()
