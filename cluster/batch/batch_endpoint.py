"""BatchEndpoint: sends a line to a service's HTTP endpoint until it has an answer that stays."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import httpx2

from legato.cluster.error_reasons import Reason
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from legato.cluster.batch.batch_input import BatchLine

CONNECT_TIMEOUT_S = 5.0
SLACK_S = 30.0  # beyond the request's own deadline, for the answer to come
DAY_S = 86400.0  # what a line may take where the batch has no deadline
PATIENCE_S = 120.0  # with no answer of any router, the batch stops
FIRST_DELAY_S, MAX_DELAY_S = 0.25, 10.0
# Asking again may help: a conflict, a full queue, no worker.
_RETRIED = (408, 409, 429, 502, 503)
_SHUTTING_DOWN = Reason.SHUTTING_DOWN.name.lower()  # as an error's `code`
_TOO_SHORT = Reason.DEADLINE_TOO_SHORT.name.lower()


class OutOfTimeError(Exception):
    """The batch's deadline has come before the line's answer."""


@dataclass(frozen=True)
class LineResult:
    """What came of a line."""

    status: int
    request_id: str
    body: Any  # JSON


class BatchEndpoint:
    """`urls` of the routers of one service; where one is lost, another is asked."""

    def __init__(
        self,
        urls: Sequence[str],
        concurrency: int,
        deadline_s: float | None,
        token: str | None,
        *,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        """`deadline_s`: on the monotonic clock. `verify`: whom to trust where a url is https://."""
        self._urls = list(urls)
        self._next = 0  # which one is asked first
        self._deadline_s = deadline_s
        self._ended: set[str] = set()  # of the urls: they said that their service ends
        self._heard_s = time.monotonic()  # when a router last said anything but that it cannot
        self._client = httpx2.AsyncClient(
            verify=verify,
            trust_env=False,  # a service is near: no proxy
            headers={"authorization": f"Bearer {token}"} if token else {},
            limits=httpx2.Limits(
                max_connections=concurrency, max_keepalive_connections=concurrency
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """Raises ServiceError where there is no such service, or the token is wrong."""
        problem, remedy = "", "say where it is with --url"
        for url in self._urls:
            try:
                response = await self._client.get(f"{url}/v1/models", timeout=CONNECT_TIMEOUT_S)
            except httpx2.RemoteProtocolError as error:
                where = url.partition("://")[2]
                if not problem:
                    problem = f"what listens at {url} speaks no HTTP ({_reason(error)})"
                    remedy = (
                        "if it is the service's gRPC port, say --address "
                        f"{where} in the place of --url"
                    )
                continue
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                problem = problem or f"no service answers at {url} ({_reason(error)})"
                continue
            if response.status_code == 401:
                raise ServiceError(f"{url} asks for a token: --token-file, or LEGATO_TOKEN")
            if response.status_code == 200:
                return
            problem = f"what listens at {url} is no Legato service (HTTP {response.status_code})"
            remedy = "say where it is with --url"
        raise ServiceError(f"{problem}; {remedy}")

    async def answer(self, line: BatchLine) -> LineResult:
        """Returns an answer, or an error that asking again would not change.

        Raises:
            OutOfTimeError: the deadline came first.
            ServiceError: no router has answered for PATIENCE_S, or all say that they end.
        """
        body = {**line.body, "priority": "batch"}
        delay_s = FIRST_DELAY_S
        while True:
            asked = await self._ask(line.url, body)
            if isinstance(asked, httpx2.Response):
                is_final = asked.headers.get("x-should-retry") == "false"
                if asked.status_code == 504 or self._is_too_late(asked):
                    raise OutOfTimeError
                if is_final or asked.status_code not in _RETRIED:
                    return _result(asked)
                if asked.status_code != 503:
                    self._heard_s = time.monotonic()
                asked_for_s = _retry_after_s(asked)
                delay_s = max(delay_s, asked_for_s)
                reason = f"HTTP {asked.status_code}"
            else:
                reason = asked
            if self._ended.issuperset(self._urls):
                raise ServiceError(
                    f"the service at {', '.join(self._urls)} is shutting down; when it is back the "
                    "same command goes on from here"
                )
            if time.monotonic() - self._heard_s > PATIENCE_S:
                raise ServiceError(
                    f"no service has answered at {', '.join(self._urls)} for {PATIENCE_S:g} s "
                    f"({reason}); the same command goes on from here"
                )
            await asyncio.sleep(min(delay_s, max(0.0, self._left_s())))
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _ask(self, path: str, body: dict[str, Any]) -> httpx2.Response | str:
        """The response, or why there is none."""
        left_s = self._left_s()
        if left_s <= 0:
            raise OutOfTimeError
        number = self._next
        try:
            response = await self._client.post(
                self._urls[number] + path,
                json=body,
                headers={
                    "x-request-id": f"batch-{uuid.uuid4().hex[:16]}",
                    "x-request-timeout-s": f"{left_s:.3f}",
                },
                timeout=httpx2.Timeout(
                    left_s + SLACK_S, connect=CONNECT_TIMEOUT_S, pool=left_s + SLACK_S
                ),
            )
        except httpx2.TransportError as error:
            self._leave(number)
            return _reason(error)
        if response.status_code == 200:
            self._heard_s = time.monotonic()
            self._ended.clear()
        elif response.status_code == 503 and _code(response) == _SHUTTING_DOWN:
            self._ended.add(self._urls[number])
            self._leave(number)
        return response

    def _leave(self, number: int) -> None:
        if self._next == number:  # else another line has found out before
            self._next = (number + 1) % len(self._urls)

    def _is_too_late(self, response: httpx2.Response) -> bool:
        """Whether the time that is left, which is the run's, is too short for the line: in the next
        run it need not be.
        """
        return self._deadline_s is not None and _code(response) == _TOO_SHORT

    def _left_s(self) -> float:
        return DAY_S if self._deadline_s is None else self._deadline_s - time.monotonic()


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _code(response: httpx2.Response) -> str:
    try:
        return str(response.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):  # of something that stands in between
        return ""


def _result(response: httpx2.Response) -> LineResult:
    try:
        body = response.json()
    except ValueError:
        body = response.text  # of something that stands in between
    return LineResult(response.status_code, response.headers.get("x-request-id", ""), body)


def _retry_after_s(response: httpx2.Response) -> float:
    try:
        return float(response.headers.get("retry-after-ms", "")) / 1000
    except ValueError:
        return 0.0
