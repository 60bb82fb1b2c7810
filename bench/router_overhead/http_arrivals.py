"""http_arrivals: the tokens of one stream of the HTTP endpoint, with as little client as can be."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOKEN = b'"finish_reason":null'  # once in each chunk of a token
END = b"data: [DONE]"
TIMEOUT_S = 120.0


async def http_arrivals(
    address: str, name: str, num_prompt_tokens: int, max_tokens: int
) -> AsyncIterator[tuple[int, int]]:
    """(offset, count) of tokens as they come; the fake engine sends each in a message of its own.

    Raises:
        RuntimeError: the stream was refused, or broke.
    """
    body = json.dumps(
        {
            "prompt": [1000] * num_prompt_tokens,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 0,
            "ignore_eos": True,
            "stream": True,
        }
    )
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nx-request-id: {name}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            f"{body}".encode()
        )
        status = await asyncio.wait_for(reader.readline(), TIMEOUT_S)
        if status.split()[1:2] != [b"200"]:
            raise RuntimeError(f"stream {name}: {status.decode(errors='replace').strip()}")
        offset, kept = 0, b""
        while True:
            data = await asyncio.wait_for(reader.read(1 << 16), TIMEOUT_S)
            if not data:
                raise RuntimeError(f"stream {name} broke after {offset} tokens")
            window = kept + data
            count = window.count(TOKEN)
            if count:
                yield offset, count
                offset += count
            if END in window:
                return
            kept = window[-(len(TOKEN) - 1) :]  # the beginning of a mark, and no whole one
    finally:
        writer.close()
