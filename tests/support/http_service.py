"""HttpService: a router over fake workers, with its HTTP endpoint and clients of it."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import openai
from fake_worker import SEED, FakeWorker
from router_service import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

MODEL = "fake-model"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


class HttpService:
    """`service` is what the fake workers and gRPC's clients are at."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.url = f"http://{service.router.http_address}"
        self.http = httpx2.AsyncClient(base_url=self.url, trust_env=False, timeout=20)
        self.openai = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False, timeout=20),
        )

    async def post(self, path: str, **fields: Any) -> httpx2.Response:  # noqa: ANN401
        return await self.http.post(path, json=fields)

    async def refused(self, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:  # noqa: ANN401
        """Status and error of a request that is refused; nothing is held afterwards."""
        response = await self.post(path, **fields)
        return response.status_code, response.json()["error"]

    async def close(self) -> None:
        await self.http.aclose()
        await self.openai.close()


@asynccontextmanager
async def http_service(
    prefill: FakeWorker | None = None,
    decode: FakeWorker | None = None,
    **options: Any,  # noqa: ANN401
) -> AsyncIterator[HttpService]:
    """Ready; nothing is held when the block ends."""
    workers = prefill or FakeWorker("prefill"), decode or FakeWorker("decode", total_blocks=400)
    async with Service([workers[0]], [workers[1]], http_port=0, **options) as service:
        http = HttpService(service)
        try:
            yield http
            await service.settle()
        finally:
            await http.close()


def asked(max_tokens: int, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    """Fields of a request to the fake model."""
    return {"model": MODEL, "max_tokens": max_tokens, "seed": SEED, **fields}


def events(text: str) -> list[dict[str, Any]]:
    """Of a stream that has ended as it must, without that end."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def texts(chunks: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Of each choice, its pieces together."""
    joined: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            joined[choice["index"]] = joined.get(choice["index"], "") + piece
    return joined
