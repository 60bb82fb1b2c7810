"""Real engines whose decode pool is too small: every answer is the one that it is alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from engine_pair import BLOCK_SIZE, HASHER, Answer, EnginePair, running_engines
from model_checks import build
from tiny_models import VOCAB_SIZE, make_llama

from legato.worker import engine as engine_module
from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.mover import KvMover
from legato.worker.mailbox import TokenEvent
from legato.worker.priority import Priority
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.claim import Newcomer
from legato.worker.sequence import FinishReason, Sequence

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from legato.worker.forward import Model
    from legato.worker.sampler import Sampled
    from legato.worker.scheduling.decision import Decision

NUM_REQUESTS = 64
overlapping = pytest.mark.parametrize("overlap", [False, True], ids=["apart", "overlapping"])
SAMPLED = replace(SamplingParams.greedy_for(1, ignore_eos=True), temperature=1.0, top_p=0.95)


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams
    priority: Priority = Priority.INTERACTIVE


def engines_for(
    model: Model,
    requests: list[Request],
    *,
    num_slots: int,
    overlap: bool,
    prefix_cache: bool = False,
) -> AbstractAsyncContextManager[EnginePair]:
    """With a third of the room that they want."""
    rows = sum(len(r.prompt) + r.params.max_tokens for r in requests)
    return running_engines(
        model,
        num_blocks=rows // BLOCK_SIZE // 3,
        num_slots=num_slots,
        overlap=overlap,
        prior_tokens=2,
        risk=0.9,
        prefix_cache=prefix_cache,
    )


def crowd() -> list[Request]:
    """Short and long ones; greedy, drawn, penalised and with logprobs, in turn."""
    draw = random.Random(5)
    requests = []
    for number in range(NUM_REQUESTS):
        max_tokens = draw.choice((3, 9, 16, 40))
        params = replace(SAMPLED, max_tokens=max_tokens, seed=draw.getrandbits(63))
        params = (
            SamplingParams.greedy_for(max_tokens, ignore_eos=True),
            params,
            replace(params, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
            replace(params, logprobs=3, temperature=0.7),
        )[number % 4]
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 30))]
        batch = draw.random() < 0.2
        requests.append(Request(prompt, params, Priority.BATCH if batch else Priority.INTERACTIVE))
    return requests


@pytest.fixture(scope="module")
def model() -> Model:
    return build(make_llama())


@pytest.fixture(scope="module")
def alone(model: Model) -> list[list[Sampled]]:
    """The crowd's answers, each got by itself."""
    return answers_alone(model, crowd())


def answers_alone(model: Model, requests: list[Request]) -> list[list[Sampled]]:
    async def run() -> list[list[Sampled]]:
        async with running_engines(model) as pair:
            answers = []
            for request in requests:
                [answer] = await pair.ask(request.prompt, request.params)
                answers.append(answer.sampled)
            await pair.check_all_is_back()
            assert pair.decode.stats().num_preemptions == 0
            return answers

    return asyncio.run(run())


def check_same(answer: Answer, right: list[Sampled]) -> None:
    """The same tokens, and the same bits of their logprobs where no row was computed anew."""
    assert answer.token_ids == [token.token_id for token in right]
    assert answer.finish_reason is FinishReason.LENGTH
    for ours, expected in zip(answer.sampled, right, strict=True):
        assert [i for i, _ in ours.top] == [i for i, _ in expected.top]
        values = [ours.logprob, *(v for _, v in ours.top)]
        right_values = [expected.logprob, *(v for _, v in expected.top)]
        assert values == (pytest.approx(right_values) if answer.num_returns else right_values)


@overlapping
@pytest.mark.parametrize("num_slots", [0, 16, 600], ids=["return", "both", "swap"])
async def test_64_requests_on_a_third_of_the_room_they_want(
    model: Model, alone: list[list[Sampled]], overlap: bool, num_slots: int
) -> None:
    requests = crowd()
    async with engines_for(
        model, requests, num_slots=num_slots, overlap=overlap, prefix_cache=True
    ) as pair:
        answers = await asyncio.gather(
            *(pair.ask(r.prompt, r.params, 1, r.priority) for r in requests)
        )
        for [answer], right in zip(answers, alone, strict=True):
            check_same(answer, right)
            assert answer.num_joined <= 1 + answer.num_returns
        await pair.check_all_is_back()
        stats = pair.decode.stats()
        returns = sum(answer.num_returns for [answer] in answers)
        swaps = sum(answer.num_swaps for [answer] in answers)
        assert stats.num_preemptions >= 8
        assert (returns > 0) == (num_slots < 600)
        assert (swaps > 0) == (num_slots > 0)
        assert stats.num_returned >= returns

        # What the last to end have left behind is what its names say.
        seconds = [second_turn(answer) for answer in pair.ended[:-7:-1]]
        pair.num_found = 0
        again = [await pair.ask(r.prompt, r.params) for r in seconds]
        assert pair.num_found > 0
        await pair.check_all_is_back()
    rights = await asyncio.to_thread(answers_alone, model, seconds)
    for [answer], right in zip(again, rights, strict=True):
        check_same(answer, right)


def second_turn(answer: Answer) -> Request:
    prompt = answer.prompt + answer.token_ids + [7, 11, 13]
    return Request(prompt, SamplingParams.greedy_for(6, ignore_eos=True))


@overlapping
@pytest.mark.parametrize(
    "prompt_length", [1, 3 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1]
)
@pytest.mark.parametrize("prefix_cache", [False, True])
async def test_answers_to_one_prompt_are_those_of_their_seeds(
    model: Model, prompt_length: int, overlap: bool, prefix_cache: bool
) -> None:
    prompt = list(range(20, 20 + prompt_length))
    params = replace(SAMPLED, max_tokens=14, seed=2**63 - 2)  # the seeds go round
    seeds = [2**63 - 2, 2**63 - 1, 0, 1]
    async with running_engines(model, overlap=overlap, prefix_cache=prefix_cache) as pair:
        answers = await pair.ask(prompt, params, num_answers=4)
        assert len({tuple(answer.token_ids) for answer in answers}) == 4
        for answer in answers:
            hashes = HASHER.block_hashes(prompt + answer.token_ids[:-1])
            found = pair.pool.count_cached_prefix(hashes)
            assert found == (len(hashes) if prefix_cache else 0)
        for answer, seed in zip(answers, seeds, strict=True):
            [own] = await pair.ask(prompt, replace(params, seed=seed))
            assert answer.sampled == own.sampled
            assert answer.num_joined == 1
        await pair.check_all_is_back()


@overlapping
async def test_an_answer_that_ends_with_its_first_token_leaves_the_others_their_rows(
    model: Model, overlap: bool
) -> None:
    params = replace(SAMPLED, max_tokens=10, seed=40)
    prompt = list(range(50, 50 + 3 * BLOCK_SIZE + 2))
    async with running_engines(model, overlap=overlap) as pair:
        whole = await pair.ask(prompt, params, num_answers=3)
        firsts = [answer.token_ids[0] for answer in whole]
        assert firsts[0] not in firsts[1:]
        stopping = replace(params, stop_token_ids=frozenset(firsts[:1]))
        answers = await pair.ask(prompt, stopping, num_answers=3)
        assert (answers[0].token_ids, answers[0].finish_reason) == (firsts[:1], FinishReason.STOP)
        for answer, other in zip(answers[1:], whole[1:], strict=True):
            ends = [i for i, token in enumerate(other.token_ids) if token == firsts[0]]
            assert answer.token_ids == other.token_ids[: ends[0] + 1 if ends else None]
        one = await pair.ask(prompt, replace(params, max_tokens=1), num_answers=3)
        assert [answer.token_ids for answer in one] == [[token] for token in firsts]
        await pair.check_all_is_back()


@overlapping
@pytest.mark.parametrize("num_slots", [0, 200])
async def test_answers_to_one_prompt_are_preempted_apart(
    model: Model, overlap: bool, num_slots: int
) -> None:
    params = [replace(SAMPLED, max_tokens=30, seed=1000 * i) for i in range(6)]
    prompts = [list(range(9 * i, 9 * i + 8 + i)) for i in range(6)]
    async with running_engines(
        model, num_blocks=50, num_slots=num_slots, overlap=overlap, prior_tokens=2, risk=0.9
    ) as pair:
        asked = await asyncio.gather(
            *(pair.ask(p, q, num_answers=3) for p, q in zip(prompts, params, strict=True))
        )
        assert pair.decode.stats().num_preemptions >= 3
        await pair.check_all_is_back()
    requests = [
        Request(p, q.for_answer(i)) for p, q in zip(prompts, params, strict=True) for i in range(3)
    ]
    alone = await asyncio.to_thread(answers_alone, model, requests)
    answers = [answer for group in asked for answer in group]
    for answer, right in zip(answers, alone, strict=True):
        check_same(answer, right)


@overlapping
@pytest.mark.parametrize("max_tokens", range(2, 2 * BLOCK_SIZE + 2))
async def test_a_second_turn_finds_the_prompt_and_the_answer(
    model: Model, overlap: bool, max_tokens: int
) -> None:
    prompt = list(range(100, 110))
    async with running_engines(model, overlap=overlap, prefix_cache=True) as pair:
        [first] = await pair.ask(prompt, replace(SAMPLED, max_tokens=max_tokens, seed=3))
        await pair.check_all_is_back()
        assert pair.num_found == 0
        request = second_turn(first)
        [second] = await pair.ask(request.prompt, request.params)
        # The last token has no row.
        assert pair.num_found == (len(prompt) + max_tokens - 1) // BLOCK_SIZE
        await pair.check_all_is_back()
    [right] = await asyncio.to_thread(answers_alone, model, [request])
    check_same(second, right)


@overlapping
async def test_the_last_token_of_one_that_had_to_leave_may_have_been_its_end(
    model: Model, overlap: bool
) -> None:
    """Then nobody is told that it was preempted."""
    prompts = [list(range(30, 38)), list(range(60, 68))]
    params = SamplingParams.greedy_for(24, ignore_eos=True)
    alone = await asyncio.to_thread(answers_alone, model, [Request(p, params) for p in prompts])
    right = [token.token_id for token in alone[1]]
    ended_untold = 0
    for place in range(1, 20):
        if right[place] in right[:place]:
            continue
        stopping = replace(params, stop_token_ids=frozenset(right[place : place + 1]))
        async with running_engines(
            model,
            num_blocks=9,
            overlap=overlap,
            prior_tokens=1,
            risk=0.9,
            start_decode=False,
        ) as pair:
            pair.release_delay_s = 0.01  # time enough to be told something after the end
            first, second = await pair.ask_together([(prompts[0], params), (prompts[1], stopping)])
            assert first.sampled == alone[0]
            assert second.token_ids == right[: place + 1]
            await pair.check_all_is_back()
            ended_untold += pair.decode.stats().num_returned - second.num_returns
    assert (ended_untold > 0) == overlap


@overlapping
async def test_what_others_do_with_free_blocks_meanwhile_does_no_harm(
    model: Model, alone: list[list[Sampled]], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a decision and its moves, another thread may take and overwrite all that is free."""
    requests = crowd()[:24]
    rows = sum(len(r.prompt) + r.params.max_tokens for r in requests)
    forked = replace(SAMPLED, max_tokens=20, seed=5)
    async with running_engines(
        model,
        num_blocks=rows // BLOCK_SIZE // 3,
        num_slots=40,
        overlap=overlap,
        prior_tokens=2,
        risk=0.9,
    ) as pair:
        run = KvMover.run
        num_taken = 0

        def run_late(mover: KvMover, decision: Decision) -> None:
            nonlocal num_taken
            taken = None
            while taken is None:  # the event loop may be quicker
                taken = pair.pool.allocate(pair.pool.usage().available)
            num_taken += len(taken)
            for pages in pair.cache.layers:
                for block in taken:
                    place = slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
                    pages.k[place] = pages.v[place] = 1e3
            pair.pool.free(taken)
            run(mover, decision)

        monkeypatch.setattr(KvMover, "run", run_late)
        asked = await asyncio.gather(
            pair.ask(list(range(11)), forked, num_answers=3),
            *(pair.ask(r.prompt, r.params) for r in requests),
        )
        assert num_taken > 100
        assert pair.decode.stats().num_preemptions > 0
        await pair.check_all_is_back()
    own = [Request(list(range(11)), forked.for_answer(i)) for i in range(3)]
    rights = await asyncio.to_thread(answers_alone, model, own) + alone[:24]
    for answer, right in zip((a for group in asked for a in group), rights, strict=True):
        check_same(answer, right)


async def sits_out(pair: EnginePair) -> tuple[Sequence, list[int]]:
    """A sequence alone on the engine, and all blocks that it lacks in another's hand."""
    [claim] = pair.ledger.admit(Newcomer(BLOCK_SIZE - 1, 3 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1))
    blocks, _ = pair.ledger.bind(claim)
    params = SamplingParams.greedy_for(2 * BLOCK_SIZE + 1, ignore_eos=True)
    tokens = list(range(BLOCK_SIZE))
    sequence = Sequence(
        tokens,
        BLOCK_SIZE,
        params,
        frozenset(),
        num_computed=BLOCK_SIZE - 1,
        lease=BlockLease(pair.pool, blocks),
        claim=claim,
    )
    taken = pair.pool.allocate(pair.pool.usage().available)
    assert taken is not None
    return sequence, taken


@overlapping
async def test_one_without_a_block_neither_spins_nor_hangs(
    model: Model, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_IDLE_WAIT_S", 600.0)
    async with running_engines(model, num_blocks=6, overlap=overlap) as pair:
        schedules: list[bool] = []
        schedule = pair.scheduler.schedule

        def counted(now: float) -> object:
            step = schedule(now)
            schedules.append(step is not None)
            return step

        monkeypatch.setattr(pair.scheduler, "schedule", counted)
        sequence, taken = await sits_out(pair)
        mailbox = pair.decode.submit(sequence)
        tokens = 0
        while tokens < 1:  # the row that it has room for
            tokens += sum(isinstance(e, TokenEvent) for e in await mailbox.take())
        await asyncio.sleep(0.1)
        assert schedules.count(True) == 1
        assert len(schedules) <= 4
        pair.pool.free(taken)
        pair.decode.wake()
        while tokens < 2 * BLOCK_SIZE + 1:
            events = [e for e in await mailbox.take() if isinstance(e, TokenEvent)]
            tokens += len(events)
        assert events[-1].finish_reason is FinishReason.LENGTH
        pair.decode.release(sequence, mailbox)
        await pair.check_all_is_back()


@overlapping
async def test_released_wherever_it_stands(model: Model, overlap: bool) -> None:
    """Calls that end at any moment, those of swapped ones and of forks included, leave nothing."""
    draw = random.Random(2)
    async with running_engines(
        model, num_blocks=60, num_slots=40, overlap=overlap, prior_tokens=2, risk=0.9
    ) as pair:
        for _ in range(3):
            params = replace(SAMPLED, max_tokens=60, seed=1)
            calls = [
                asyncio.create_task(lone_call(pair, list(range(i, i + 9)), params))
                for i in range(12)
            ]
            await pair.until(lambda: pair.decode.stats().num_swapped > 0)
            draw.shuffle(calls)
            for call in calls:
                call.cancel()
                await asyncio.sleep(0)
            await asyncio.gather(*calls, return_exceptions=True)
            await pair.check_all_is_back()
        [answer] = await pair.ask([1, 2, 3], SamplingParams.greedy_for(20, ignore_eos=True))
        assert len(answer.token_ids) == 20
        await pair.check_all_is_back()


async def test_an_answer_that_the_router_ends_counts_among_the_lengths(model: Model) -> None:
    async with running_engines(model, prior_tokens=500) as pair:
        for stopped in (False, True):
            params = SamplingParams.greedy_for(400, ignore_eos=True)
            await lone_call(pair, [1, 2, 3], params, num_tokens=7, stopped=stopped)
            await pair.check_all_is_back()
        lengths = list(pair.ledger._lengths._recent)
        [length] = [length for length in lengths if length != 500]
        assert 7 <= length < 400


async def lone_call(
    pair: EnginePair,
    tokens: list[int],
    params: SamplingParams,
    *,
    num_tokens: int = 1000,
    stopped: bool = False,
) -> None:
    """A decode call over rows of zeros, which frees everything when it is cancelled, or ends by
    itself after `num_tokens`.
    """
    rows = len(tokens) - 1
    max_rows = rows + params.max_tokens
    [claim] = await pair.admit(Newcomer(rows, max_rows, params.max_tokens))
    blocks, _ = pair.ledger.bind(claim)
    sequence = Sequence(
        tokens,
        len(tokens),
        params,
        frozenset(),
        num_computed=rows,
        lease=BlockLease(pair.pool, blocks),
        claim=claim,
    )
    mailbox = pair.decode.submit(sequence)
    seen = 0
    try:
        while seen < num_tokens:
            seen += sum(isinstance(event, TokenEvent) for event in await mailbox.take())
    finally:
        pair.decode.release(sequence, mailbox, stopped=stopped)


async def test_what_a_swapped_one_wrote_before_is_registered_again(model: Model) -> None:
    """Its blocks are others after it came back; a second turn finds them all."""
    async with running_engines(
        model,
        num_blocks=14,
        num_slots=20,
        prior_tokens=1,
        risk=0.9,
        prefix_cache=True,
        start_decode=False,
    ) as pair:
        params = SamplingParams.greedy_for(24, ignore_eos=True)
        prompts = [list(range(30, 38)), list(range(60, 68))]
        _, second = await pair.ask_together([(prompt, params) for prompt in prompts])
        await pair.check_all_is_back()
        assert second.num_swaps > 0
        hashes = HASHER.block_hashes(second.prompt + second.token_ids)
        # It was the last to end, so none of its blocks was evicted; the last token has no row.
        assert pair.pool.count_cached_prefix(hashes) == (8 + 24 - 1) // BLOCK_SIZE


@overlapping
@pytest.mark.parametrize("num_slots", [0, 600], ids=["return", "swap"])
async def test_a_crowd_that_is_parked_and_resumed_at_random(
    model: Model, alone: list[list[Sampled]], overlap: bool, num_slots: int
) -> None:
    """On a third of the room that they want: every answer is the one that it is alone."""
    requests = crowd()
    async with engines_for(model, requests, num_slots=num_slots, overlap=overlap) as pair:
        pair.parks = random.Random(3)
        answers = await asyncio.gather(
            *(pair.ask(r.prompt, r.params, 1, r.priority) for r in requests)
        )
        assert pair.num_parked > 50
        assert pair.decode.stats().num_preemptions > 0
        await pair.check_all_is_back()
    for [answer], right in zip(answers, alone, strict=True):
        check_same(answer, right)
