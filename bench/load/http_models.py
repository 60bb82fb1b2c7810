"""choose_model: which of a server's models is measured."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx2

from legato.cluster.errors import ServiceError

ASK_TIMEOUT_S = 10.0
MAX_SHOWN_MODELS = 8


async def choose_model(client: httpx2.AsyncClient, url: str, wanted: str) -> tuple[str, int | None]:
    """Its name, and its context's length where that is told. `wanted`: "" for the only one.

    Raises:
        ServiceError: nobody answers, a token is wanted, or there is no such model, or several.
    """
    try:
        response = await client.get(f"{url}/v1/models", timeout=ASK_TIMEOUT_S)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ServiceError(
            f"no server answers at {url} ({str(error) or type(error).__name__}); say where it "
            "is with --url"
        ) from error
    if response.status_code in (401, 403):
        raise ServiceError(f"{url} asks for a token: --token-file, or LEGATO_TOKEN")
    models: list[dict[str, Any]] = []
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if response.status_code == 200:
            models = [m for m in response.json()["data"] if isinstance(m["id"], str)]
    names = [model["id"] for model in models]
    if not wanted and len(names) != 1:
        shown = ", ".join(names[:MAX_SHOWN_MODELS]) or "no model"
        raise ServiceError(f"{url}/v1/models names {shown}; say which one with --model")
    if wanted and names and wanted not in names:
        shown = ", ".join(names[:MAX_SHOWN_MODELS])
        raise ServiceError(f"--model {wanted!r} is not served at {url}, which has {shown}")
    name = wanted or names[0]
    chosen = next((model for model in models if model["id"] == name), {})
    length = chosen.get("max_model_len")
    return name, length if isinstance(length, int) else None
