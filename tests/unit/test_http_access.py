"""Every route of the HTTP endpoint asks for what the gRPC port asks for; only /health is open."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import httpx2
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route
from text_service import TextService

from legato.cluster.batch.batch_endpoint import BatchEndpoint
from legato.cluster.client_access import ClientAccess, ClientTls
from legato.cluster.config import RouterOptions
from legato.cluster.dev_certs import make_certs
from legato.cluster.errors import ServiceError
from legato.cluster.http import server as http_server
from legato.protos.tls_files import TlsFiles

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator
    from pathlib import Path

    from fastapi import FastAPI

TOKEN = "token-of-a-client-1"
KNOWN = {"authorization": f"Bearer {TOKEN}"}
HIDDEN = ("/openapi.json", "/docs", "/no/such/route", "/", "/health/", "/Health")


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[TextService]:  # noqa: ANN401  # of RouterOptions
    folder.mkdir()  # noqa: ASYNC240  # a moment, before anything runs
    settings = RouterOptions(port=0, http_port=0, local_prefill_tokens=0, **options)
    async with TextService(folder, settings) as service:
        yield service


def routes(service: TextService) -> list[tuple[str, str]]:
    """Those of the application itself: a document may leave some out."""
    http = service.router._http
    assert http is not None
    app = cast("FastAPI", http._server.config.app)
    # What is no Route, such as a mount or a web socket, would need a question of its own.
    assert all(isinstance(route, Route | APIRoute) for route in app.routes)
    return sorted(
        (method.lower(), route.path.replace("{model:path}", "fake"))
        for route in app.routes
        if isinstance(route, Route | APIRoute)
        for method in route.methods or ()
    )


async def test_every_route_needs_a_token_and_only_health_does_not(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(TOKEN)
    async with (
        serving(tmp_path / "model", token_file=str(tmp_path / "tokens")) as service,
        httpx2.AsyncClient(base_url=f"http://{service.router.http_address}") as client,
    ):
        told = routes(service)
        assert {path for _, path in told} >= {"/", "/health", "/v1/completions", "/openapi.json"}
        document = (await client.get("/openapi.json", headers=KNOWN)).json()
        in_words = {path.replace("{model}", "fake") for path in document["paths"]}
        assert in_words == {path for _, path in told} - {"/openapi.json"}
        asked = [*told, *(("get", path) for path in HIDDEN), ("options", "/v1/models")]
        for method, path in asked:
            for headers in (
                [],
                [("authorization", "Bearer guessed-by-somebody-1")],
                [("authorization", TOKEN)],
                [("x-authorization", f"Bearer {TOKEN}")],
                [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer guessed")],
                [("cookie", f"authorization=Bearer {TOKEN}")],
            ):
                answer = await client.request(method, path, headers=headers)
                if path in ("/health", "/"):  # the page itself tells nothing of the service
                    assert answer.status_code == 200
                    continue
                assert answer.status_code == 401, (method, path, headers)
                assert method == "head" or "--token-file" in answer.text
                assert "guessed" not in answer.text
                assert TOKEN not in answer.text
        for method, path in told:
            # The page's events have no end.
            async with client.stream(method, path, headers=KNOWN, json={}) as answer:
                assert answer.status_code != 401, path
        body = {"model": "fake", "prompt": "hello", "max_tokens": 3}
        answer = await client.post("/v1/completions", headers=KNOWN, json=body)
        assert answer.status_code == 200


def client_context(certs: Path, name: str | None = "client") -> ssl.SSLContext:
    pair = (str(certs / f"{name}.pem"), str(certs / f"{name}.key")) if name else (None, None)
    return ClientTls(str(certs / "ca.pem"), *pair).ssl_context()


async def is_served(url: str, context: ssl.SSLContext | bool) -> bool:
    async with httpx2.AsyncClient(base_url=url, verify=context, trust_env=False) as client:
        try:
            return (await client.get("/health", timeout=5)).status_code == 200
        except httpx2.TransportError:
            return False


async def test_with_certificates_it_speaks_tls_to_its_clients_alone(tmp_path: Path) -> None:
    ours, theirs, used = (tmp_path / name for name in ("ours", "theirs", "used"))
    make_certs(ours)
    make_certs(theirs)
    shutil.copytree(ours, used)
    tls = TlsFiles(*(str(used / name) for name in ("service.pem", "service.key", "ca.pem")))
    async with serving(tmp_path / "model", tls=tls) as service:
        url = f"https://{service.router.http_address}"
        assert await is_served(url, client_context(ours))
        assert not await is_served(url, client_context(ours, None))
        assert not await is_served(url, client_context(theirs))
        assert not await is_served(url.replace("https", "http"), True)
        async with BatchEndpoint([url], 1, None, None, verify=client_context(ours)) as endpoint:
            await endpoint.check()
        async with BatchEndpoint([url], 1, None, None) as endpoint:
            with pytest.raises(ServiceError, match="no service answers"):
                await endpoint.check()
        http = service.router._http
        assert http is not None
        (used / "service.pem").write_text("half of a")
        http._renew_tls()
        assert await is_served(url, client_context(ours))


async def test_without_a_ca_no_certificate_is_asked_for(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    make_certs(certs)
    tls = TlsFiles(str(certs / "service.pem"), str(certs / "service.key"))
    async with serving(tmp_path / "model", tls=tls) as service:
        url = f"https://{service.router.http_address}"
        assert await is_served(url, client_context(certs, None))
        assert not await is_served(url, True)  # the machine's authorities know nothing of ours


async def test_a_tls_handshake_that_never_comes_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.2)
    certs = tmp_path / "certs"
    make_certs(certs)
    tls = TlsFiles(str(certs / "service.pem"), str(certs / "service.key"))
    async with serving(tmp_path / "model", tls=tls) as service:
        host, port = service.router.http_address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(5):  # asyncio's own bound is a minute
            assert await reader.read() == b""
        writer.close()


async def test_a_new_pair_counts_for_new_connections(tmp_path: Path) -> None:
    ours, theirs, used = (tmp_path / name for name in ("ours", "theirs", "used"))
    make_certs(ours)
    make_certs(theirs)
    shutil.copytree(ours, used)
    tls = TlsFiles(str(used / "service.pem"), str(used / "service.key"))
    async with serving(tmp_path / "model", tls=tls) as service:
        url = f"https://{service.router.http_address}"
        assert await is_served(url, client_context(ours, None))
        for name in ("service.key", "service.pem"):
            shutil.copy(theirs / name, used / name)
        http = service.router._http
        assert http is not None
        http._renew_tls()
        assert await is_served(url, client_context(theirs, None))
        assert not await is_served(url, client_context(ours, None))


@pytest.mark.parametrize(
    ("url", "is_fine"),
    [("http://127.0.0.1:8000", True), ("http://127.0.0.1", True), ("http://[::1]:8000", True),
     ("http://10.0.0.5:8000", False), ("http://10.0.0.5", False), ("https://10.0.0.5", True)],
)  # fmt: skip
def test_a_token_goes_to_no_other_machine_over_http(url: str, is_fine: bool) -> None:
    access = ClientAccess(TOKEN, ClientTls())
    if is_fine:
        access.check_urls([url])
    else:
        with pytest.raises(ValueError, match="in plain"):
            access.check_urls(["https://a", url])
