"""add_page: the live page, what it is fed with, and `/metrics`."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request  # noqa: TC002  # FastAPI reads the annotations
from starlette.responses import Response

from legato.cluster.errors import unavailable
from legato.cluster.http.openapi import texts
from legato.cluster.http.posted import read_posted
from legato.cluster.http.request_body import read_object
from legato.cluster.metrics.exposition import families, written
from legato.cluster.page.chat import ChatRun, read_chat
from legato.cluster.page.live_response import LiveResponse
from legato.cluster.page.state import page_state

if TYPE_CHECKING:
    from fastapi import FastAPI

    from legato.cluster.page.live_response import Write
    from legato.cluster.router import Router
    from legato.protos import generation_pb2

PERIOD_S = 1.0
MAX_VIEWERS = 64
METRICS = texts("text/plain", "application/openmetrics-text")
EVENTS = texts("text/event-stream", errors=[503])
CHAT = texts("text/event-stream", errors=[400, 413, 415])
PAGE = Path(__file__).parent / "index.html"


def add_page(app: FastAPI, router: Router) -> None:
    """`GET /` has nothing of the service in it; all that it shows comes by the other routes."""
    html = PAGE.read_bytes()
    headers = page_headers(html.decode())
    viewers: set[Request] = set()

    @app.get("/", response_class=Response, openapi_extra=texts("text/html"))
    async def page() -> Response:
        """The live page."""
        return Response(html, headers=headers, media_type="text/html")

    @app.get("/metrics", response_class=Response, openapi_extra=METRICS)
    async def metrics(request: Request) -> Response:
        """For Prometheus; OpenMetrics where it is asked for."""
        told = families(router)
        accept = request.headers.get("accept")
        # Of many workers it takes tens of milliseconds, which tokens are not to wait for.
        body, content_type = await asyncio.to_thread(written, told, accept)
        return Response(body, headers={"content-type": content_type})

    @app.get("/page/events", response_class=Response, openapi_extra=EVENTS)
    async def events(request: Request) -> Response:
        """Server-sent events: `history` once, then `state` every second."""
        if len(viewers) >= MAX_VIEWERS:
            raise unavailable(f"{len(viewers)} look at the page (limit {MAX_VIEWERS})")

        async def serve(write: Write) -> None:
            viewers.add(request)
            try:
                await write("history", [asdict(sample) for sample in router.history.samples])
                while True:
                    samples = router.history.samples
                    sample = asdict(samples[-1]) if samples else None
                    await write("state", {**page_state(router), "sample": sample})
                    await asyncio.sleep(PERIOD_S)
            finally:
                viewers.discard(request)

        return LiveResponse(serve)

    def read(body: bytes) -> generation_pb2.GenerateRequest:
        return read_chat(read_object(body), has_template=router.text.has_chat_template)

    @app.post("/page/chat", response_class=Response, openapi_extra=CHAT)
    async def chat(request: Request) -> Response:
        """Server-sent events: `tokens`, then `finish` with the way that the request took."""
        with router.reads(chat=True):
            asked = await read_posted(router, request, read)
        return LiveResponse(ChatRun(router, asked, request.headers).serve)


def page_headers(html: str) -> dict[str, str]:
    """Only the script and the style that are in the file may run, and only this origin is asked."""
    hashes = {}
    for tag in ("script", "style"):
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(p.encode()).digest()).decode() for p in parts]
        hashes[tag] = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = {
        "default-src": "'none'",
        "script-src": hashes["script"],
        "style-src": hashes["style"],
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{k} {v}" for k, v in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
