"""The whole data path with real worker processes: counts, sharing, errors, cancellation."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import TYPE_CHECKING

import grpc
import pytest
import pytest_asyncio
from local_service import Answer, LocalService, collect, request
from oracle import greedy, load_oracle
from tiny_models import make_llama_folder

from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from transformers import PreTrainedModel

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

INVALID = grpc.StatusCode.INVALID_ARGUMENT
CONTEXT = 2048  # long answers: what is cancelled is not over by itself before
VOCAB = 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(
        tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=CONTEXT
    )


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    return load_oracle(folder)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(folder: Path) -> AsyncIterator[LocalService]:
    async with LocalService(folder) as service:
        yield service


async def ask(
    service: LocalService, message: generation_pb2.GenerateRequest, timeout_s: float = 60
) -> list[int]:
    return (await collect(service.generation.Generate(message, timeout=timeout_s))).token_ids


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def canary(service: LocalService, oracle: PreTrainedModel) -> AsyncIterator[None]:
    """After every test nothing is held and a known answer still comes."""
    yield
    await service.wait_idle()
    prompt = list(b"canary")
    answer = await ask(service, request(prompt, max_tokens=16, ignore_eos=True), 5)
    assert answer == greedy(oracle, prompt, 16)


async def counters(service: LocalService) -> tuple[common_pb2.WorkerLoad, common_pb2.WorkerLoad]:
    """(prefill, decode), settled."""
    await service.wait_idle()
    loads = dict(await service.loads())
    return loads[common_pb2.WORKER_ROLE_PREFILL], loads[common_pb2.WORKER_ROLE_DECODE]


@pytest.mark.parametrize("n", [1, 2, 3, 17])
async def test_n_tokens_cost_one_prefill_and_n_minus_1_decode_forwards(
    service: LocalService, n: int
) -> None:
    prefill_before, decode_before = await counters(service)
    prompt = list(f"count {n} forwards".encode())  # of its own: nothing of it is cached
    answer = await collect(
        service.generation.Generate(request(prompt, max_tokens=n, ignore_eos=True), timeout=30)
    )
    prefill, decode = await counters(service)
    assert len(answer.token_ids) == n
    assert answer.done.finish_reason == common_pb2.FINISH_REASON_LENGTH
    timings = answer.done.timings
    assert (timings.prefill_forwards, timings.decode_forwards) == (1, n - 1)
    assert timings.kv_tokens_written == len(prompt) + n - 1
    assert prefill.prefill_steps - prefill_before.prefill_steps == 1
    assert decode.decode_steps - decode_before.decode_steps == n - 1
    assert decode.decode_tokens - decode_before.decode_tokens == n - 1
    handed_over = 0 if n == 1 else 1
    assert decode.kv_transfers_completed - decode_before.kv_transfers_completed == handed_over
    assert (timings.kv_bytes_handed_over > 0) == bool(handed_over)
    phases = (
        timings.queue_s
        + timings.ticket_s
        + timings.prefill_s
        + timings.handoff_s
        + timings.decode_s
        + timings.delivery_s
    )
    assert math.isclose(phases, timings.total_s, abs_tol=1e-6)


NUM_SHARED = 112  # so many that streams which begin apart meet


async def test_16_streams_share_decode_steps_and_keep_their_solo_answers(
    service: LocalService, oracle: PreTrainedModel
) -> None:
    prompts = [list((f"stream {i} " * (i + 1)).encode()) for i in range(16)]
    _, before = await counters(service)
    answers = await asyncio.gather(
        *(ask(service, request(p, max_tokens=NUM_SHARED, ignore_eos=True)) for p in prompts)
    )
    _, after = await counters(service)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == greedy(oracle, prompt, NUM_SHARED)
    tokens = after.decode_tokens - before.decode_tokens
    steps = after.decode_steps - before.decode_steps
    assert tokens == 16 * (NUM_SHARED - 1)
    assert steps < tokens / 2, f"{tokens} tokens took {steps} steps: they did not share"


def chat(role: str) -> generation_pb2.GenerateRequest:
    message = generation_pb2.ChatMessage(role=role, content="hi")
    return generation_pb2.GenerateRequest(messages=generation_pb2.ChatMessages(messages=[message]))


BAD: list[tuple[str, Callable[[], generation_pb2.GenerateRequest], grpc.StatusCode, list[str]]] = [
    ("no prompt", lambda: generation_pb2.GenerateRequest(), INVALID, ["prompt"]),
    ("empty text", lambda: request(""), INVALID, ["text"]),
    (
        "no ids",
        lambda: generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds()),
        INVALID,
        ["token_ids"],
    ),
    (
        "beyond the context",
        lambda: request([5] * (CONTEXT + 1)),
        INVALID,
        [str(CONTEXT + 1), str(CONTEXT)],
    ),
    ("the whole context", lambda: request([5] * CONTEXT), INVALID, [str(CONTEXT)]),
    ("id too large", lambda: request([1, VOCAB]), INVALID, ["token_ids", "320"]),
    ("id negative", lambda: request([1, -1]), INVALID, ["token_ids", "-1"]),
    (
        "temperature negative",
        lambda: request("x", temperature=-1.0),
        INVALID,
        ["temperature", "-1"],
    ),
    (
        "temperature NaN",
        lambda: request("x", temperature=math.nan),
        INVALID,
        ["temperature", "nan"],
    ),
    (
        "temperature inf",
        lambda: request("x", temperature=math.inf),
        INVALID,
        ["temperature", "inf"],
    ),
    ("max_tokens 0", lambda: request("x", max_tokens=0), INVALID, ["max_tokens", "0"]),
    ("top_p 0", lambda: request("x", top_p=0.0), INVALID, ["top_p", "0"]),
    ("seed negative", lambda: request("x", seed=-1), INVALID, ["seed", "-1"]),
    ("empty stop", lambda: request("x", stop=[""]), INVALID, ["stop"]),
    ("unknown role", lambda: chat("wizard"), INVALID, ["role", "wizard", "assistant"]),
    (
        "huge n",
        lambda: generation_pb2.GenerateRequest(text="x", n=1_000_000),
        INVALID,
        ["n", "1000000"],
    ),
]


@pytest.mark.parametrize(("make", "code", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
async def test_bad_input_is_refused_by_name(
    service: LocalService,
    make: Callable[[], generation_pb2.GenerateRequest],
    code: grpc.StatusCode,
    words: list[str],
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await collect(service.generation.Generate(make(), timeout=10))
    assert error.value.code() == code, error.value.details()
    for word in words:
        assert word in (error.value.details() or "")


@pytest.mark.parametrize("max_tokens", [None, 1, 2])
async def test_one_token_fits_behind_a_prompt_of_context_minus_one(
    service: LocalService, max_tokens: int | None
) -> None:
    sampling = {} if max_tokens is None else {"max_tokens": max_tokens}
    message = request([5] * (CONTEXT - 1), **sampling)
    message.sampling.ignore_eos = True
    answer = await collect(service.generation.Generate(message, timeout=30))
    assert len(answer.token_ids) == 1
    assert answer.done.finish_reason == common_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("after_deltas", [0, 1, 5])
async def test_a_client_that_goes_away_frees_both_sides(
    service: LocalService, after_deltas: int
) -> None:
    _, before = await counters(service)
    call = service.generation.Generate(request("bye", max_tokens=2000, ignore_eos=True), timeout=60)
    seen = 0
    while seen < after_deltas:
        await call.read()
        seen += 1
    call.cancel()
    _, after = await counters(service)
    assert after.decode_tokens - before.decode_tokens < 1999, "it ran to its end"
    status = await service.status()
    assert status.router.in_flight == 0


async def test_300_requests_cancelled_at_random_moments_leave_nothing(
    service: LocalService,
) -> None:
    _, before = await counters(service)
    hits: Counter[str] = Counter()
    asked = received = 0  # tokens of decode steps, of those that were not cancelled before

    async def one(i: int) -> None:
        nonlocal asked, received
        max_tokens = 3 if i % 6 == 0 else 1000
        call = service.generation.Generate(
            request("c" * (1 + i % 90), max_tokens=max_tokens, ignore_eos=True), timeout=60
        )
        answer, begun = Answer(), asyncio.Event()

        async def read() -> None:
            async for response in call:
                answer.take(response)
                begun.set()

        reading = asyncio.create_task(read())
        if i % 3 == 1:  # its moment counts from the first token, not from the start
            await asyncio.wait_for(begun.wait(), 60)
        elif i % 12 == 0:
            await asyncio.wait({reading})
        await asyncio.sleep((i * 37 % 100) / 400)
        if answer.finish is not None:
            phase = "over"
        else:
            phase = "decoding" if answer.token_ids else "before the first token"
        hits[phase] += 1
        if answer.token_ids:
            asked += max_tokens - 1
            received += len(answer.token_ids) - 1
        call.cancel()
        await asyncio.wait({reading})
        assert phase == "over" or reading.cancelled()

    for start in range(0, 300, 50):
        await asyncio.gather(*(one(i) for i in range(start, start + 50)))
    await service.wait_idle(5.0)
    _, after = await counters(service)
    made = after.decode_tokens - before.decode_tokens
    assert len(hits) == 3, f"some moments were never hit: {hits}"
    assert made < (received + asked) / 2, f"{made=}: {received} came of {asked}, then cancels"
    # 90 % of the pool is free for one request again: the context bounds it here.
    answer = await ask(service, request([5] * 400, max_tokens=100, ignore_eos=True))
    assert len(answer) == 100


async def test_seeds(service: LocalService) -> None:
    def seeded(seed: int | None) -> generation_pb2.GenerateRequest:
        message = request("seeds", max_tokens=24, ignore_eos=True, temperature=1.0)
        if seed is not None:
            message.sampling.seed = seed
        return message

    alone = await ask(service, seeded(0))
    crowd = await asyncio.gather(
        ask(service, seeded(0)),
        *(ask(service, seeded(None)) for _ in range(4)),
        ask(service, seeded(2**63 - 1)),
    )
    assert crowd[0] == alone
    assert len({tuple(answer) for answer in crowd}) == len(crowd)


async def test_same_id_twice(service: LocalService) -> None:
    first = service.generation.Generate(
        request("one", request_id="same", max_tokens=2000, ignore_eos=True), timeout=30
    )
    await first.read()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await ask(service, request("two", request_id="same", max_tokens=4))
    assert error.value.code() == grpc.StatusCode.ALREADY_EXISTS
    first.cancel()
    await service.wait_idle()
    assert len(await ask(service, request("two", request_id="same", max_tokens=4))) <= 4


async def test_logprobs_of_every_token(service: LocalService) -> None:
    answer = await collect(
        service.generation.Generate(
            request("logprobs", max_tokens=8, ignore_eos=True, logprobs=3), timeout=30
        )
    )
    assert len(answer.logprobs) == 8
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        values = [top.logprob for top in entry.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.top[0].token_id == token
        assert math.isclose(entry.top[0].logprob, entry.logprob, abs_tol=1e-6)


async def test_larger_than_a_grpc_message_is_a_clear_status(service: LocalService) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await ask(service, request("x" * (5 << 20)))
    assert error.value.code() in (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
