"""--kv-cache int8 and fp8: memory, the wire, and a pair of workers against one engine alone."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import torch
from memory_checkpoint import MemoryCheckpoint
from paged_runner import PagedRunner
from tiny_models import make_model
from worker_pair import WAIT_S, sampling

from legato.protos import worker_pb2, worker_pb2_grpc
from legato.worker.channel import CHANNEL_OPTIONS
from legato.worker.config import WorkerConfig
from legato.worker.kv.cache import KV_CACHE_DTYPES, KvCache, KvShape, choose_kv_dtype
from legato.worker.loading import LoadedModel
from legato.worker.models.build import build_model
from legato.worker.server import WorkerServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from legato.worker.config import Role
    from legato.worker.forward import Model

CPU = torch.device("cpu")


def shape_of(dtype: torch.dtype, *, head_dim: int = 64) -> KvShape:
    return KvShape(num_layers=2, num_kv_heads=3, head_dim=head_dim, block_size=4, dtype=dtype)


def test_rows_and_scales_are_counted() -> None:
    assert shape_of(torch.bfloat16).bytes_per_token == 2 * 2 * 3 * 64 * 2
    for dtype in KV_CACHE_DTYPES.values():
        shape = shape_of(dtype)
        assert shape.bytes_per_token == 2 * 2 * 3 * (64 + 4)
        # 128 bytes a head in bf16, 68 in 8 bits.
        blocks = shape.num_blocks(1 << 20)
        assert blocks == (1 << 20) // (shape.bytes_per_token * 4)
        assert blocks / shape_of(torch.bfloat16).num_blocks(1 << 20) == pytest.approx(
            128 / 68, rel=0.01
        )
        pages = KvCache(shape, 5, CPU).layers[0]
        assert pages.k_scale is not None
        rows = sum(t.nbytes for t in (pages.k, pages.v, pages.k_scale, pages.k_scale))
        assert rows == 6 * 4 * shape.bytes_per_row  # one block is spare


def test_the_names_of_kv_dtypes() -> None:
    assert choose_kv_dtype("auto", torch.bfloat16) is torch.bfloat16
    assert choose_kv_dtype("int8", torch.bfloat16) is torch.int8
    assert choose_kv_dtype("fp8", torch.float32) is torch.float8_e4m3fn
    with pytest.raises(ValueError, match="kv_cache must be auto, fp8 or int8, got 'int4'"):
        WorkerConfig(model="m", role="decode", kv_cache="int4")


def tiny_model() -> Model:
    llama = make_model("llama", num_hidden_layers=3, initializer_range=0.3)
    return build_model(MemoryCheckpoint(llama), CPU, torch.float32)


def alone(model: Model, prompt: list[int], num_tokens: int, dtype: torch.dtype) -> list[int]:
    """The greedy answer of one engine, in one process, over one cache."""
    runner = PagedRunner(model, block_size=4, dtype=dtype)
    tokens, new = list(prompt), list(prompt)
    for _ in range(num_tokens):
        new = [int(runner.step({0: new})[0].argmax())]
        tokens += new
    return tokens[len(prompt) :]


@asynccontextmanager
async def serving(
    role: Role, model: Model, kv_cache: str
) -> AsyncIterator[tuple[WorkerServer, str]]:
    server = WorkerServer(
        WorkerConfig(
            model="tiny",
            role=role,
            kv_cache=kv_cache,
            kv_memory_bytes=1 << 20,
            block_size=4 if role == "prefill" else 6,
            prefill_chunk_tokens=16,
            num_threads=1,
        ),
        LoadedModel(model, "tiny", "float32", torch.float32, CPU, Path("tiny")),
        exit_process=lambda: None,
        step_timeout_s=60.0,
    )
    address = await server.start()
    try:
        yield server, address
    finally:
        await server.stop(0)


async def answer(
    prefill: str, decode: str, prompt: list[int], num_tokens: int
) -> tuple[list[int], worker_pb2.PrefillEvent]:
    """Over a pair, as a router would; the event tells how the hand-off went."""
    params = sampling(num_tokens, ignore_eos=True)
    key = worker_pb2.AttemptKey(request_id="r", attempt=0)
    async with (
        grpc.aio.insecure_channel(prefill, options=CHANNEL_OPTIONS) as p,
        grpc.aio.insecure_channel(decode, options=CHANNEL_OPTIONS) as d,
    ):
        call = worker_pb2_grpc.DecodeWorkerStub(d).Decode(timeout=WAIT_S)
        reserve = worker_pb2.Reserve(
            key=key,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=params,
        )
        await call.write(worker_pb2.DecodeCommand(reserve=reserve))
        ticket = (await call.read()).ticket
        request = worker_pb2.PrefillRequest(
            key=key,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=params,
            ticket=ticket,
            decode_address=decode,
        )
        prefilling = worker_pb2_grpc.PrefillWorkerStub(p).Prefill(timeout=WAIT_S)
        await prefilling.write(worker_pb2.PrefillCommand(request=request))
        tokens = [(await prefilling.read()).first_token.answers[0].token.token_id]
        start = worker_pb2.Start(answers=[worker_pb2.StartAnswer(token_id=tokens[0])])
        await call.write(worker_pb2.DecodeCommand(start=start))
        handoff = await prefilling.read()
        if handoff.WhichOneof("event") != "handoff_done":
            return tokens, handoff
        while True:
            event = await call.read()
            assert event != grpc.aio.EOF, await call.details()
            tokens += [token.token_id for token in event.tokens.tokens]
            if event.WhichOneof("event") == "tokens" and event.tokens.finished:
                return tokens, handoff


@pytest.mark.parametrize("kv_cache", KV_CACHE_DTYPES)
async def test_a_pair_answers_like_one_engine_with_the_same_kv(kv_cache: str) -> None:
    model, dtype = tiny_model(), KV_CACHE_DTYPES[kv_cache]
    prompts = [[(7 * i * i + 3 * salt) % 256 for i in range(23 + salt)] for salt in range(6)]
    wanted = [alone(model, prompt, 24, dtype) for prompt in prompts]
    # The rounding is seen: in full precision some answers are others.
    assert any(
        alone(model, p, 24, torch.float32) != w for p, w in zip(prompts, wanted, strict=True)
    )
    async with (
        serving("prefill", model, kv_cache) as (prefill, p_address),
        serving("decode", model, kv_cache) as (decode, d_address),
    ):
        for prompt, want in zip(prompts, wanted, strict=True):
            tokens, handoff = await answer(p_address, d_address, prompt, 24)
            assert tokens == want
            shape = decode.node.cache.shape
            assert handoff.handoff_done.kv_bytes == len(prompt) * shape.bytes_per_token
        for server in (prefill, decode):
            assert server.node.identity.kv_layout().dtype == str(dtype).removeprefix("torch.")
            assert server.node.identity.dtype is torch.float32


async def test_workers_with_different_kv_refuse_each_other_by_name() -> None:
    model = tiny_model()
    async with (
        serving("prefill", model, "int8") as (_, p_address),
        serving("decode", model, "fp8") as (_, d_address),
    ):
        _, event = await answer(p_address, d_address, [1, 2, 3, 4, 5], 3)
        reason = event.handoff_failed.reason
        assert "layout.dtype is 'int8', this worker's is 'float8_e4m3fn'" in reason
