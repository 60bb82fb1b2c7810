"""A deadline that is wrong, on a service where nobody waits: told as such, and nothing is begun."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_worker import FakeWorker
from http_service import TEXT, asked, http_service
from router_service import ask, collect

from legato.cluster.spoken_time import spoken_time


async def test_it_has_a_reason_of_its_own_and_no_hint_over_grpc_and_http() -> None:
    decode = FakeWorker("decode", total_blocks=4000, step_s=0.02)
    async with http_service(decode=decode) as service:
        for _ in range(5):
            response = await service.post(TEXT, **asked(9, prompt="hello"))
            assert response.status_code == 200
        await asyncio.sleep(0.2)  # the next look at who is too late is due
        served = len(decode.reserves)
        long = asked(3000, prompt="hello", ignore_eos=True)
        response = await service.http.post(TEXT, json=long, headers={"x-request-timeout-s": "1"})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (429, "deadline_too_short")
        assert "is too short for what is asked: " in error["message"]
        assert "retry-after" not in response.headers
        assert response.headers["x-should-retry"] == "false"
        await asyncio.sleep(0.2)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(service.service, ask("hello", 3000, ignore_eos=True), timeout_s=1.0)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "is too short for what is asked: " in (raised.value.details() or "")
        assert len(decode.reserves) == served


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (0.4321, "0.432 s"),
        (506.2, "506 s"),
        (1060.0, "18 min"),
        (100_000.0, "28 h"),
        (60_000_000.0, "694 days"),
    ],
)
def test_people_are_told_seconds_in_words(seconds: float, words: str) -> None:
    assert spoken_time(seconds) == words
