"""HttpTarget: any server of OpenAI's API, over HTTP and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from typing import TYPE_CHECKING, Self

import httpx2

from legato.bench.load.event_stream import EventStream
from legato.bench.load.http_answer import HttpAnswer, ServerError
from legato.bench.load.http_form import TEXT_PATH, HttpForm, forms
from legato.bench.load.http_models import choose_model
from legato.bench.load.prompt_text import WORDS, PromptText, text_of
from legato.bench.load.sample import INCOMPLETE, Sample
from legato.bench.load.server_metrics import SOURCE, ServerMetrics
from legato.bench.load.spread import spread
from legato.bench.load.target import Served, ServerTimes
from legato.bench.load.workload import Planned
from legato.cluster.client_access import NOTHING_SHOWN
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.load.workload import LoadWorkload
    from legato.cluster.client_access import ClientAccess

CONNECT_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 10.0
GREETING_TIMEOUT_S = 60.0
MAX_ERROR_BYTES = 4096
# Token ids that a prompt may have: the largest of these that the server takes. Its vocabulary is
# not told; those of nearly all models are larger than the first.
_ID_LIMITS = (30_000, 8192, 1000, 256)
_FEW_IDS = 9  # all vocabularies have them
_FEW_WORDS, _MANY_WORDS = 40, 240
_WRONG_FORM = ("HTTP 400", "HTTP 404", "HTTP 405", "HTTP 415", "HTTP 422", "HTTP 501")
_NO_ROUTE = ("HTTP 404", "HTTP 405")


class HttpTarget:
    """`urls`: http://host:port of one service's routers, which take turns; a path that ends with
    /v1 is that of the API. `model`: by default the only one that the server names.

    When it is entered it finds out what the server takes: token ids or text, as long answers as
    asked, and how it says how many tokens came; see `HttpForm` and `HttpAnswer`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        access: ClientAccess = NOTHING_SHOWN,
        model: str | None = None,
    ) -> None:
        self._urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._turns = itertools.cycle(self._urls)
        self._access = access
        self._model = model or ""
        self._form = HttpForm(TEXT_PATH, takes_ids=True)
        self._id_limit = _FEW_IDS
        self._text = PromptText()
        self._served: Served | None = None
        self._metrics: ServerMetrics | None = None

    async def __aenter__(self) -> Self:
        """Raises ServiceError where there is no such server, or it answers no short request."""
        try:
            self._access.check_urls(self._urls)
            tls = self._access.tls
            verify = True if tls is None else tls.ssl_context()
        except ValueError as error:
            raise ServiceError(str(error)) from error
        token = self._access.token
        self._client = httpx2.AsyncClient(
            verify=verify,
            trust_env=False,  # a proxy would be measured with it
            headers={"authorization": f"Bearer {token}"} if token else {},
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )
        try:
            asked = choose_model(self._client, self._urls[0], self._model)
            self._model, context_length = await asked
            await self._find_form()
            notes = self._form.notes + await self._measure_text()
            self._served = Served(
                ",".join(self._urls),
                self._model,
                self._form.path,
                "token ids" if self._form.takes_ids else "text",
                context_length,
                notes,
            )
            self._metrics = await self._look_at_metrics()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    @property
    def served(self) -> Served:
        """What is there."""
        assert self._served is not None, "used outside of `async with`"
        return self._served

    def request(self, workload: LoadWorkload, planned: Planned) -> bytes:
        """The body. Text is about as long as planned."""
        prompt: str | list[int]
        if self._form.takes_ids:
            prompt = workload.draw(planned, planned.input_tokens, self._id_limit)
        else:
            num_words = self._text.num_words(planned.input_tokens)
            prompt = text_of(workload.draw(planned, num_words, len(WORDS)))
        return self._form.body(self._model, prompt, planned.output_tokens)

    async def send(self, request: bytes, sample: Sample, timeout_s: float) -> None:
        """As Target has it. A failure has its HTTP status, or a gRPC code for what is the same
        here: UNAVAILABLE, DEADLINE_EXCEEDED.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._read(next(self._turns) + self._form.path, request, sample)
        except TimeoutError:
            sample.fail(time.monotonic(), "DEADLINE_EXCEEDED", f"no end within {timeout_s:g} s")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            code = INCOMPLETE if sample.token_times_s else "UNAVAILABLE"
            sample.fail(time.monotonic(), code, str(error) or type(error).__name__)
        except ServerError as error:
            sample.fail(time.monotonic(), "STREAM_ERROR", str(error))
        except ValueError as error:  # no events, or no JSON in them
            sample.fail(time.monotonic(), "STREAM_ERROR", f"is no stream of JSON events: {error}")

    async def server_times(self, samples: Sequence[Sample]) -> ServerTimes:
        """Of each answer where its last chunk says so, else from /metrics."""
        told = [sample.server_times_s for sample in samples if sample.ok]
        if names := {name for times in told for name in times}:
            return ServerTimes(
                "each answer",
                {name: spread([t[name] for t in told if name in t]) for name in sorted(names)},
            )
        after = await self._look_at_metrics()
        if self._metrics is None or after is None:
            return ServerTimes(None)
        since = after.since(self._metrics)
        return ServerTimes(SOURCE if since else None, dict(since))

    async def _read(self, url: str, request: bytes, sample: Sample) -> None:
        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            "accept-encoding": "identity",  # a compressed stream would come in lumps
        }
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        async with self._client.stream(
            "POST", url, content=request, headers=headers, timeout=timeout
        ) as response:
            if response.status_code != 200:
                error = await _error_of(response)
                sample.fail(time.monotonic(), f"HTTP {response.status_code}", error)
                return
            answer, events = HttpAnswer(sample), EventStream()
            async for data in response.aiter_raw():
                now_s = time.monotonic()
                for event in events.feed(data):
                    if event == b"[DONE]":
                        answer.done()
                    else:
                        answer.take(json.loads(event), now_s)
            answer.end(time.monotonic())

    async def _find_form(self) -> None:
        """The first form that the server takes, and which ids."""
        refused: list[Sample] = []
        absent: set[str] = set()  # of the paths
        for form in forms():
            if form.path in absent:
                continue
            self._form = form
            sample = await self._greet(_FEW_IDS)
            if sample.ok:
                break
            if sample.code not in _WRONG_FORM:
                raise ServiceError(
                    f"{self._urls[0]} does not answer a short request: {sample.code}, "
                    f"{sample.error}"
                )
            refused.append(sample)
            if sample.code in _NO_ROUTE:
                absent.add(form.path)
        else:
            plainest = [s for s in refused if s.code not in _NO_ROUTE] or refused
            raise ServiceError(
                f"{self._urls[0]} takes no form of a request that is known: {plainest[-1].code}, "
                f"{plainest[-1].error}"
            )
        if self._form.takes_ids:
            for limit in _ID_LIMITS:
                if (await self._greet(limit)).ok:
                    self._id_limit = limit
                    break

    async def _greet(self, id_limit: int) -> Sample:
        """A short request, with the largest id below the limit."""
        prompt: str | list[int] = [1, 2, 3, id_limit - 1] if self._form.takes_ids else "Good day"
        return await self._try(prompt, 2)

    async def _try(self, prompt: str | list[int], max_tokens: int) -> Sample:
        now_s = time.monotonic()
        sample = Sample(Planned(0, None, 1, max_tokens), now_s, now_s)
        body = self._form.body(self._model, prompt, max_tokens)
        await self.send(body, sample, GREETING_TIMEOUT_S)
        return sample

    async def _measure_text(self) -> tuple[str, ...]:
        """How many tokens words have; returns what is to be said of it."""
        if self._form.takes_ids:
            return ()
        draw = random.SystemRandom()  # words that came before would be found in a cache
        counted: list[tuple[int, int]] = []
        for num_words in (_FEW_WORDS, _MANY_WORDS):
            words = text_of(draw.choices(range(len(WORDS)), k=num_words))
            num_tokens = (await self._try(words, 1)).prompt_tokens
            if num_tokens is None:
                return ("the server counts no prompt tokens: a word is taken for one",)
            counted.append((num_words, num_tokens))
        try:
            self._text = PromptText.measured(*counted)
        except ValueError as error:
            return (f"{error}: a word is taken for a token",)
        return ()

    async def _look_at_metrics(self) -> ServerMetrics | None:
        texts = []
        for url in self._urls:
            try:
                response = await self._client.get(
                    f"{url}/metrics", headers={"accept": "text/plain"}, timeout=ASK_TIMEOUT_S
                )
            except (httpx2.HTTPError, httpx2.InvalidURL):
                return None
            if response.status_code != 200:
                return None
            texts.append(response.text)
        try:
            return ServerMetrics.parse(texts)
        except ValueError:
            return None


async def _error_of(response: httpx2.Response) -> str:
    """Its sentence, or its beginning."""
    body = b""
    async for data in response.aiter_raw():
        body += data
        if len(body) > MAX_ERROR_BYTES:
            break
    text = body[:MAX_ERROR_BYTES].decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, AttributeError):
        told = json.loads(text)
        error = told.get("error", told)
        return str(error["message"] if isinstance(error, dict) else error)
    return text
