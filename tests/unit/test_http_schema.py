"""schemathesis on /openapi.json: the endpoint takes, refuses and answers as the document says."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import schemathesis
from http_service import http_service
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# Of each operation, well-formed and malformed each.
NUM_CASES = 2_000 if os.environ.get("LEGATO_FUZZ") == "full" else 12
# A deadline that passes is a 504, which is documented; no 500 is what the test itself asks.
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
ENDLESS = "/page/"  # streams of the live page, with tests of their own


def play(operation: Any, mode: GenerationMode, url: str, seen: list[int]) -> None:  # noqa: ANN401  # its own
    @settings(
        max_examples=NUM_CASES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:  # noqa: ANN401  # as above
        response = case.call(base_url=url, timeout=30)
        seen.append(response.status_code)
        case.validate_response(response, checks=CHECKS)

    run: Callable[[], None] = one
    run()


async def test_the_document_is_true() -> None:
    async with http_service() as service:
        url = f"http://{service.service.router.http_address}"
        schema = await asyncio.to_thread(schemathesis.openapi.from_url, f"{url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        played = [found for found in operations if not found.path.startswith(ENDLESS)]
        assert {found.path for found in played} >= {
            "/health",
            "/metrics",
            "/v1/models",
            "/v1/completions",
            "/v1/chat/completions",
        }
        seen: dict[str, list[int]] = {}
        for operation in played:
            modes = [GenerationMode.POSITIVE]
            if operation.body:
                modes.append(GenerationMode.NEGATIVE)
            for mode in modes:
                codes = seen.setdefault(f"{operation.path} {mode.value}", [])
                await asyncio.to_thread(play, operation, mode, url, codes)
        print({where: dict(Counter(codes)) for where, codes in seen.items()})
        assert all(500 not in codes for codes in seen.values())
        assert 200 in seen["/v1/completions positive"]
        assert 200 not in seen["/v1/completions negative"]
        assert 200 not in seen["/v1/chat/completions negative"]
