"""A sequence whose logits are NaN ends alone; an engine that has no others is taken for broken."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_engine import VOCAB_SIZE
from worker_pair import Attempt, Pair, Worker, running_pair, sampling

from legato.protos.never_retry import NEVER_RETRY
from legato.worker.engine import Engine
from legato.worker.lifecycle import Phase

pytestmark = pytest.mark.parametrize("overlap", [False, True])
PROMPTS = [[10 * i + 1, 10 * i + 2, 10 * i + 3] for i in range(1, 4)]  # of the neighbours
BAD_PROMPT = [7, 8, 9]
NUM_TOKENS = 20
BROKEN_STEPS_LIMIT = 4


@pytest.fixture(autouse=True)
def _overlapping(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    defaults = {**(Engine.__init__.__kwdefaults__ or {}), "overlap": overlap}
    monkeypatch.setattr(Engine.__init__, "__kwdefaults__", defaults)


async def ends_before(attempt: Attempt, index: int) -> None:
    """Runs it: the token at `index` is the one that cannot be chosen."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await attempt.run()
    error = raised.value
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == (
        "the model gave no usable logits for this request: NaN or infinite values at output "
        f"position {index} (from 0)"
    )
    assert NEVER_RETRY in tuple(error.trailing_metadata() or ())
    assert len(attempt.tokens) == len(attempt.prompt) + index  # those before it were delivered
    attempt.close()


async def test_in_prefill_its_neighbours_go_on(overlap: bool) -> None:
    async with running_pair() as pair:
        model = pair.p.model
        model.breaks_after = {BAD_PROMPT[-1]}
        model.go.clear()
        # It holds the engine until the others are there, who then share a step.
        first = asyncio.create_task(Attempt(pair, [5], sampling(1), request_id="first").run())
        await asyncio.to_thread(model.inside.wait, 20)
        bad = asyncio.create_task(ends_before(Attempt(pair, BAD_PROMPT, sampling(9)), 0))
        runs = [
            asyncio.create_task(Attempt(pair, p, sampling(NUM_TOKENS), request_id=f"r{i}").run())
            for i, p in enumerate(PROMPTS)
        ]
        await pair.p.until(lambda load: load.waiting == 4)
        model.go.set()
        await bad
        for prompt, run in zip(PROMPTS, runs, strict=True):
            assert await run == model.expected(prompt, NUM_TOKENS)
        await first
        await pair.until_idle()
        assert [3, 3, 3, 3] in model.steps


async def test_in_decode_its_neighbours_go_on(overlap: bool) -> None:
    async with running_pair() as pair:
        model = pair.d.model
        answers = [model.expected(prompt, NUM_TOKENS) for prompt in PROMPTS]
        bad_answer = model.expected(BAD_PROMPT, NUM_TOKENS)
        others = {token for answer in answers for token in answer}
        place = next(i for i in range(4, 15) if bad_answer[i] not in {*others, *bad_answer[:i]})
        model.breaks_after = {bad_answer[place]}
        model.go.clear()  # until all have landed, so that they surely share steps
        bad = Attempt(pair, BAD_PROMPT, sampling(NUM_TOKENS))
        ending = asyncio.create_task(ends_before(bad, place + 1))
        runs = [
            asyncio.create_task(Attempt(pair, p, sampling(NUM_TOKENS), request_id=f"r{i}").run())
            for i, p in enumerate(PROMPTS)
        ]
        await pair.d.until(lambda load: load.kv_transfers_completed == 4)
        model.go.set()
        await ending
        assert bad.tokens[3:] == bad_answer[: place + 1]
        for answer, run in zip(answers, runs, strict=True):
            assert await run == answer
        await pair.until_idle()
        assert [1, 1, 1, 1] in model.steps


async def break_alone(pair: Pair, worker: Worker) -> None:
    worker.model.breaks_after = set(range(VOCAB_SIZE))
    await ends_before(Attempt(pair, BAD_PROMPT, sampling(5)), 0 if worker is pair.p else 1)
    worker.model.breaks_after = set()
    await pair.until_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_broken_steps_in_a_row_end_the_engine(role: str, overlap: bool) -> None:
    exits: list[str] = []
    async with running_pair(**{role[0]: {"exits": exits}}) as pair:  # type: ignore[arg-type]  # p or d
        worker = pair.p if role == "prefill" else pair.d
        for _ in range(BROKEN_STEPS_LIMIT - 1):
            await break_alone(pair, worker)
        # One whole answer, and it is the requests' fault again.
        whole = Attempt(pair, PROMPTS[0], sampling(5))
        assert await whole.run() == worker.model.expected(PROMPTS[0], 5)
        for _ in range(BROKEN_STEPS_LIMIT - 1):
            await break_alone(pair, worker)
        assert worker.server.phase is Phase.READY
        worker.model.breaks_after = set(range(VOCAB_SIZE))
        last = Attempt(pair, BAD_PROMPT, sampling(5))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await last.run()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE  # another worker may serve it
        assert NEVER_RETRY not in tuple(raised.value.trailing_metadata() or ())
        assert "steps in a row were NaN or infinite" in (raised.value.details() or "")
        assert worker.server.phase is Phase.DEAD
        await worker.until(lambda _: bool(exits))
        last.close()
