"""FakeOpenAi: a server of OpenAI's API, of any of the kinds that are about."""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Fields = dict[str, Any]
_BASE = {"model", "prompt", "messages", "max_tokens", "temperature", "stream", "stream_options"}


class RefusedError(Exception):
    """An HTTP status, with a sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class FakeOpenAi:
    """What it takes, how it counts, and how it fails. Tokens are words; one id is one token."""

    models: tuple[str, ...] = ("m",)
    paths: tuple[str, ...] = ("/v1/completions", "/v1/chat/completions")
    takes_ids: bool = True
    takes_text: bool = True
    fields: frozenset[str] = frozenset({"ignore_eos"})  # beyond OpenAI's
    vocab_size: int = 9000
    tokens_per_word: int = 1
    overhead: int = 0  # tokens of a prompt beyond its words
    usage: str = "chunk"  # "chunk", "end" or "never"
    tokens_per_chunk: int = 1
    first_s: float = 0.0  # as chunk_s, without the greeting's
    chunk_s: float = 0.0
    most_tokens: int = 1000  # of an answer: then comes EOS
    last: Fields = field(default_factory=dict)  # besides, in the last chunk
    status: int = 200  # of all answers but the greeting's
    cut_after: int | None = None  # chunks, then the connection ends
    end_after: int | None = None  # chunks, then the stream ends as if that were all
    error_after: int | None = None  # chunks, then an event with an error
    metrics: list[str] = field(default_factory=list)  # one text for each time it is asked
    running: int = 0  # answers now, and the most at once
    most: int = 0
    asked: list[Fields] = field(default_factory=list)  # bodies of what was answered
    heads: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                method, path, _ = head.split(b" ", 2)
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                body = await reader.readexactly(length)
                try:
                    await self._answer(method.decode(), path.decode(), body, writer)
                except RefusedError as error:
                    told = {"error": {"message": str(error)}}
                    _whole(writer, error.status, json.dumps(told).encode())
                await writer.drain()
        writer.close()

    async def _answer(
        self, method: str, path: str, body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if path == "/v1/models":
            told = {"data": [{"id": name, "max_model_len": 500} for name in self.models]}
            _whole(writer, 200, json.dumps(told).encode())
        elif path == "/metrics" and self.metrics:
            text = self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]
            _whole(writer, 200, text.encode())
        elif path in self.paths and method == "POST":
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self._stream(json.loads(body), writer)
            finally:
                self.running -= 1
        else:
            raise RefusedError(404, "no such route")

    def _prompt_tokens(self, asked: Fields) -> int:
        if unknown := asked.keys() - _BASE - self.fields:
            raise RefusedError(400, f"{unknown.pop()} is no field")
        if "usage" not in str(self.fields) and "continuous_usage_stats" in str(asked):
            raise RefusedError(422, "continuous_usage_stats is no field")
        prompt = asked.get("prompt")
        if isinstance(prompt, list):
            if not self.takes_ids:
                raise RefusedError(400, "prompt must be a string")
            if max(prompt) >= self.vocab_size:
                raise RefusedError(400, "a token id is out of the vocabulary")
            return len(prompt)
        if not self.takes_text:
            raise RefusedError(400, "prompt must be token ids")
        text = asked["messages"][0]["content"] if prompt is None else prompt
        return self.overhead + self.tokens_per_word * len(text.split())

    async def _stream(self, asked: Fields, writer: asyncio.StreamWriter) -> None:
        num_prompt = self._prompt_tokens(asked)
        is_greeting = asked["max_tokens"] <= 2
        if self.status != 200 and not is_greeting:
            raise RefusedError(self.status, "not now")
        self.asked.append(asked)
        chat = "messages" in asked
        _head(writer, 200, "content-type: text/event-stream\r\ntransfer-encoding: chunked")
        await asyncio.sleep(0 if is_greeting else self.first_s)
        if chat:
            delta = {"role": "assistant", "content": ""}
            _chunk(writer, {"choices": [{"delta": delta, "finish_reason": None}]})
        total = min(asked["max_tokens"], self.most_tokens)
        options = asked.get("stream_options", {})
        for num_chunks, done in enumerate(range(0, total, self.tokens_per_chunk)):
            if num_chunks and not is_greeting:
                await asyncio.sleep(self.chunk_s)
            count = min(self.tokens_per_chunk, total - done)
            if not is_greeting and num_chunks == self.cut_after:
                raise ConnectionResetError
            if not is_greeting and num_chunks == self.end_after:
                break
            if not is_greeting and num_chunks == self.error_after:
                _chunk(writer, {"error": {"message": "the worker is gone"}})
                break
            text = " word" * count
            choice: Fields = {"delta": {"content": text}} if chat else {"text": text}
            chunk: Fields = {"choices": [{**choice, "index": 0, "finish_reason": None}]}
            if self.usage == "chunk" and options.get("continuous_usage_stats"):
                chunk["usage"] = _usage(num_prompt, done + count)
            _chunk(writer, chunk)
            await writer.drain()
        else:
            end = {"delta": {}} if chat else {"text": ""}
            last: Fields = {"choices": [{**end, "finish_reason": "length"}], **self.last}
            if self.usage != "never" and options.get("include_usage"):
                last["usage"] = _usage(num_prompt, total)
            _chunk(writer, last)
            _data(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


@asynccontextmanager
async def openai_at(server: FakeOpenAi) -> AsyncIterator[str]:
    """Its URL, while the block runs."""
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


def _usage(prompt: int, answer: int) -> Fields:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "prompt_tokens_details": {"cached_tokens": prompt // 4},
    }


def _head(writer: asyncio.StreamWriter, status: int, fields: str) -> None:
    writer.write(f"HTTP/1.1 {status} Fake\r\n{fields}\r\n\r\n".encode())


def _whole(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    _head(writer, status, f"content-type: application/json\r\ncontent-length: {len(body)}")
    writer.write(body)


def _chunk(writer: asyncio.StreamWriter, told: Fields) -> None:
    _data(writer, f"data: {json.dumps(told)}\n\n".encode())


def _data(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
