"""Pools that hold weights and KV in other dtypes: real processes against both engines alone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from local_service import LocalService, LocalWorker, collect, request, start_worker
from oracle import greedy, load_oracle
from paged_runner import PagedRunner
from tiny_models import make_llama_folder

from legato.kernels.kv_quantize import convert_rows
from legato.worker.config import WorkerConfig
from legato.worker.kv.cache import choose_kv_dtype
from legato.worker.kv.wire import KV_WIRE_DTYPES
from legato.worker.loading import load_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from legato.cluster.control_plane import Role
    from legato.kernels.kv_pages import KvPages

pytestmark = pytest.mark.integration

NUM_TOKENS = 24
BLOCK_SIZES = {"prefill": 7, "decode": 32}
PROMPTS = [[(7 * i * i + 3 * n + i) % 256 for i in range(n)] for n in (1, 17, 100)]


@dataclass(frozen=True)
class Pool:
    """What its workers are told."""

    dtype: str = "float32"
    kv_cache: str = "auto"

    def words(self) -> list[str]:
        return ["--device", "cpu", "--dtype", self.dtype, "--kv-cache", self.kv_cache]


FP32, BF16, FP16 = Pool(), Pool("bfloat16"), Pool("float16")
FP32_INT8, BF16_FP8 = Pool(kv_cache="int8"), Pool("bfloat16", "fp8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def runner(folder: Path) -> Callable[[Pool, str], PagedRunner]:
    """A new engine of a pool's dtypes, alone in this process."""

    def make(pool: Pool, role: str) -> PagedRunner:
        loaded = load_model(
            WorkerConfig(model=str(folder), role="decode", device="cpu", dtype=pool.dtype)
        )
        pages = choose_kv_dtype(pool.kv_cache, loaded.dtype)
        return PagedRunner(loaded.model, block_size=BLOCK_SIZES[role], dtype=pages)

    return make


def hand_over(source: PagedRunner, target: PagedRunner, num_tokens: int, kv_wire: str) -> None:
    """Sequence 0's rows, by torch alone: through the wire's dtype into the target's."""
    # Its own tokens' rows are written over.
    target.step({0: [0] * num_tokens}, logits=False)

    def rows(pages: KvPages, name: str) -> tuple[Tensor, Tensor | None]:
        return getattr(pages, name), getattr(pages, f"{name}_scale")

    places = [
        torch.tensor([runner.slot(0, position) for position in range(num_tokens)])
        for runner in (source, target)
    ]
    for theirs, ours in zip(source.cache.layers, target.cache.layers, strict=True):
        for name in ("k", "v"):
            there, scales = rows(theirs, name)
            # torch cannot index fp8.
            moved = there.view(torch.int8) if there.dtype.itemsize == 1 else there
            sent = convert_rows(
                moved[places[0]].view(there.dtype),
                None if scales is None else scales[places[0]],
                KV_WIRE_DTYPES[kv_wire],
            )
            here, own_scales = rows(ours, name)
            landed, landed_scales = convert_rows(*sent, here.dtype)
            if here.dtype.itemsize == 1:
                here.view(torch.int8)[places[1]] = landed.view(torch.int8)
            else:
                here[places[1]] = landed
            if own_scales is not None and landed_scales is not None:
                own_scales[places[1]] = landed_scales


def alone(
    prefill: PagedRunner, decode: PagedRunner, prompt: list[int], kv_wire: str
) -> tuple[list[int], Tensor]:
    """The greedy answer and the logprobs of its tokens."""
    logits = [prefill.step({0: prompt})[0].float()]
    hand_over(prefill, decode, len(prompt), kv_wire)
    tokens = [int(logits[0].argmax())]
    while len(tokens) < NUM_TOKENS:
        logits.append(decode.step({0: tokens[-1:]})[0].float())
        tokens.append(int(logits[-1].argmax()))
    chosen = torch.stack(logits).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
    return tokens, chosen[:, 0]


@pytest.mark.parametrize(
    ("prefill", "decode", "kv_wire", "lane"),
    [
        (FP32, BF16, "bfloat16", "grpc"),
        (BF16, FP32, "float32", "auto"),
        (FP32, FP32_INT8, "float32", "auto"),
        (FP32, BF16, "int8", "auto"),
        (BF16_FP8, FP16, "fp8", "grpc"),
    ],
)
async def test_first_token_of_one_engine_the_rest_of_the_other(
    folder: Path,
    runner: Callable[[Pool, str], PagedRunner],
    prefill: Pool,
    decode: Pool,
    kv_wire: str,
    lane: str,
) -> None:
    words = {
        role: [*pool.words(), "--block-size", str(BLOCK_SIZES[role])]
        for role, pool in (("prefill", prefill), ("decode", decode))
    }
    async with LocalService(
        folder,
        worker_args=["--kv-wire", kv_wire, "--kv-lane", lane, "--kv-memory", "8MiB"],
        prefill_args=words["prefill"],
        decode_args=words["decode"],
    ) as service:
        answers = [
            await collect(
                service.generation.Generate(
                    request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1), timeout=60
                )
            )
            for prompt in PROMPTS
        ]
        await service.wait_idle()
        assert not service.control.lost
        kv_bytes = [answer.done.timings.kv_bytes_handed_over for answer in answers]
    oracle = load_oracle(folder)
    per_element = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 16, "fp8": 1 + 4 / 16}[kv_wire]
    others = [(prefill, prefill, kv_wire), (decode, decode, kv_wire), (FP32, FP32, "float32")]
    furthest = [0.0] * len(others)
    for prompt, answer, num_bytes in zip(PROMPTS, answers, kv_bytes, strict=True):
        tokens, logprobs = alone(
            runner(prefill, "prefill"), runner(decode, "decode"), prompt, kv_wire
        )
        assert answer.token_ids == tokens
        got = torch.tensor([token.logprob for token in answer.logprobs])
        assert (got - logprobs).abs().max() < 1e-5
        assert answer.done.timings.attempts == 1
        assert num_bytes == len(prompt) * 3 * 2 * 2 * 16 * per_element
        if prefill.dtype == "float32":
            assert answer.token_ids[0] == greedy(oracle, prompt, 1)[0]
        for index, (p, d, wire) in enumerate(others):
            other = alone(runner(p, "prefill"), runner(d, "decode"), prompt, wire)[1]
            furthest[index] = max(furthest[index], float((got - other).abs().max()))
    assert min(furthest) > 1e-3, "the comparison does not see which engine it was"


WIRE = ["--kv-memory", "8MiB", "--kv-wire", "bfloat16"]
WRONG: list[tuple[Role, list[str], str]] = [
    ("decode", [*BF16.words(), "--kv-wire", "int8"], "kv_wire is 'int8', expected 'bfloat16'"),
    ("prefill", [*FP32.words(), "--kv-wire", "same"], "kv_wire is 'same', expected 'bfloat16'"),
    (
        "decode",
        [*BF16.words(), "--weights", "int8"],
        "weights is 'int8+bfloat16', expected 'bfloat16'",
    ),
    # A request goes on within its pool: there all are alike.
    ("decode", FP32.words(), "weights is 'float32', expected 'bfloat16'"),
    ("prefill", FP32_INT8.words(), "kv_layout.dtype is 'int8', expected 'float32'"),
]


async def test_workers_that_do_not_fit_are_refused_by_name(folder: Path) -> None:
    """And disturb nobody."""
    message = request(PROMPTS[1], max_tokens=NUM_TOKENS, ignore_eos=True)
    async with LocalService(
        folder, worker_args=WIRE, prefill_args=FP32.words(), decode_args=BF16.words()
    ) as service:
        before = await collect(service.generation.Generate(message, timeout=60))
        # Three at a time: they share the machine.
        gate = asyncio.Semaphore(3)

        async def start(role: Role, words: list[str]) -> LocalWorker:
            async with gate:
                return await asyncio.to_thread(start_worker, folder, role, [*WIRE, *words])

        workers = await asyncio.gather(*(start(role, words) for role, words, _ in WRONG))
        service.workers += workers
        await service.publish()
        async with asyncio.timeout(20):
            while len(service.control.lost) < len(WRONG):  # noqa: ASYNC110  # it sets no event
                await asyncio.sleep(0.05)
        lost = dict(service.control.lost)
        for worker, (_, _, reason) in zip(workers, WRONG, strict=True):
            assert f"{worker.address}: {reason}" in lost[worker.worker_id]
        after = await collect(service.generation.Generate(message, timeout=60))
        assert after.token_ids == before.token_ids
        assert after.done.timings.attempts == 1
        await service.wait_idle()
