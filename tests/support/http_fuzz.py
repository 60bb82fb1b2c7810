"""HttpFuzz: bodies that nobody should post, made from the fields of the routes' own models."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx2
from request_fuzz import TEXTS

from legato.cluster.http.chat_fields import ChatFields
from legato.cluster.http.completion_fields import CompletionFields

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MODELS = {TEXT: CompletionFields, CHAT: ChatFields}
NUMBERS = (0, -1, 1, 2, 3, 64, 129, 320, 1e9, 1e-45, 0.5, -2.1, 2**31, -(2**31), 2**63, 2**70)
WORDS = ("type", "text", "role", "content", "schema", "json_schema", "name", "include_usage", "1",
         "a", "$ref", "properties", "items", "pattern")  # fmt: skip
RAW = (b"null", b"[]", b"5", b'"a"', b"", b"NaN", b'"\\ud800"', b"1e999", b"-1e999", b"9" * 5000,
       b"[" * 300, b'{"a":' * 300, b"\xff\xfe", b"\xef\xbb\xbf{}", b"{} {}",
       b"Infinity")  # fmt: skip
KINDS = ("application/json; charset=utf-16", "text/plain", "", "multipart/form-data", "json")
# Any other is a fault of ours: 409 and 429 are fair answers to valid requests.
FAIR = {200, 400, 404, 409, 413, 415, 429}
# No sentence may be the library's.
NOT_OURS = ("Input should", " valid ", "pydantic", "instance of", "dictionary", "Traceback")


class HttpFuzz:
    """The same requests for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> tuple[str, bytes, dict[str, str]]:
        """Path, body and headers."""
        draw, pick = self._random.random(), self._random.choice
        path = pick((TEXT, CHAT))
        headers = {"content-type": "application/json"}
        if draw < 0.05:
            return path, pick(RAW), headers
        fields = self._valid(path)
        names = [*MODELS[path].model_fields, "tools", "suffix", "foo", "\x00"]
        for _ in range(pick((1, 1, 1, 2, 3, 5))):
            fields[pick(names)] = self._value(4)
        if fields.get("n") not in (None, *range(4)) and draw < 0.9:
            fields.pop("n")  # most answers are few
        body = json.dumps(fields).encode()
        if 0.05 < draw < 0.08:
            headers["content-type"] = pick(KINDS)
        elif draw < 0.1:
            headers["content-encoding"] = pick(("gzip", "br", "zstd"))
        elif draw < 0.3:
            body = self._damaged(body)
        return path, body, headers

    def _valid(self, path: str) -> dict[str, Any]:
        prompt: Any = self._random.choice(("hello", [1, 2, 3], ["a", "b"], [[1], [2, 3]]))
        if path == CHAT:
            return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        return {"prompt": prompt, "max_tokens": 2}

    def _value(self, depth: int) -> Any:  # noqa: ANN401  # any JSON
        pick = self._random.choice
        kind = self._random.randrange(8 if depth else 5)
        if kind == 0:
            return pick((None, True, False))
        if kind in (1, 2):
            return pick(NUMBERS)
        if kind in (3, 4):
            return pick((*TEXTS, *WORDS)) * pick((1, 1, 1, 2, 300))
        count = pick((0, 1, 1, 2, 3, 17, 65, 300)) if depth > 2 else pick((0, 1, 2))
        if kind == 5:
            return [self._value(0)] * count
        if kind == 6:
            return [self._value(depth - 1) for _ in range(min(count, 4))]
        return {pick(WORDS): self._value(depth - 1) for _ in range(min(count, 4))}

    def _damaged(self, body: bytes) -> bytes:
        out, pick = bytearray(body), self._random.choice
        for _ in range(pick((1, 1, 2, 8))):
            at = self._random.randrange(len(out) + 1)
            kind = self._random.randrange(4)
            if kind == 0 and at < len(out):
                out[at] ^= 1 << self._random.randrange(8)
            elif kind == 1:
                del out[at:]
            elif kind == 2:
                out[at:at] = self._random.randbytes(pick((1, 4, 100)))
            else:
                out[at:at] = pick(RAW)
        return bytes(out)


@dataclass
class HttpTally:
    """How the requests of a run ended."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def note(self, answer: httpx2.Response, body: bytes) -> None:
        """Remembers what must not be, with the request."""
        self.statuses[answer.status_code] += 1
        wrong = answer.status_code not in FAIR
        told = ""
        if answer.status_code != 200:
            try:
                told = answer.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                wrong = True
            wrong |= not 0 < len(told) <= 2000 or any(word in told for word in NOT_OURS)
        elif answer.headers["content-type"].startswith("text/event-stream"):
            # Of a stream that has begun the error is its last event.
            wrong |= not answer.text.endswith("data: [DONE]\n\n")
            wrong |= '"server_error"' in answer.text
        if wrong and len(self.faults) < 20:
            self.faults.append(f"{answer.status_code} {answer.text[:300]!r} of {body[:400]!r}")


async def fuzz_http(
    url: str,
    seed: int,
    num_requests: int,
    *,
    num_at_once: int = 16,
    after: Callable[[int], None] = lambda num_done: None,
) -> HttpTally:
    """Posts them, so many at once; `after` is told how many have ended."""
    source, tally = HttpFuzz(seed), HttpTally()
    requests = (source.next() for _ in range(num_requests))

    async def send(client: httpx2.AsyncClient) -> None:
        for path, body, headers in requests:
            tally.note(await client.post(path, content=body, headers=headers), body)
            after(tally.statuses.total())

    async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        await asyncio.gather(*(send(client) for _ in range(num_at_once)))
    return tally
