"""Several answers to one prompt: one prefill, one hand-off, and each ends when it likes."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest
from fake_engine import VOCAB_SIZE, FakeModel, fake_config
from worker_pair import WAIT_S, Attempt, Pair, running_pair, sampling

from legato.protos import common_pb2, worker_pb2

MODEL = FakeModel(fake_config())
NUM_TOKENS = 14
EXPECTED = "stop, pause, move or unpark is expected now"
BYTES_PER_ROW = 3 * 2 * 2 * 4 * 4  # layers, K and V, heads, head_dim, fp32


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 37 + salt * 101 + 5) % VOCAB_SIZE for i in range(length)]


def expected(prompt: list[int], num_answers: int, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Those of requests of their own, with seeds 0, 1, 2 …: all differ at once."""
    return [MODEL.expected(prompt, num_tokens, seed) for seed in range(num_answers)]


def of_call(attempt: Attempt) -> int:
    """Claims that the decode worker's ledger holds."""
    return len(attempt.pair.d.server.node.tickets._ledger)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 13])
@pytest.mark.parametrize("admission", ["expected", "reserve"])
async def test_each_is_what_a_request_of_its_own_would_get(length: int, admission: str) -> None:
    async with running_pair(d={"admission": admission, "block_size": 4}) as pair:
        prompt = prompt_of(length)
        attempt = Attempt(pair, prompt, sampling(NUM_TOKENS), num_answers=5)
        assert await attempt.begin() == [0, 1, 2, 3, 4]
        answers = await attempt.finish_all()
        assert list(answers.values()) == expected(prompt, 5)
        assert attempt.num_joined == 1
        p, d = pair.p.load(), pair.d.load()
        assert (p.prefill_steps, p.prefill_tokens) == (1, length)
        assert p.kv_transfers_completed == 1
        assert d.decode_tokens == 5 * (NUM_TOKENS - 1)
        await pair.until_idle()


async def test_they_share_the_prompts_full_blocks() -> None:
    async with running_pair() as pair:
        attempt = Attempt(pair, prompt_of(18), sampling(40), num_answers=4)
        pair.d.model.go.clear()
        await attempt.begin()
        await pair.d.until(lambda load: load.running == 4)
        assert pair.d.load().held_blocks == 4 + 4  # and 4 times a fifth one
        pair.d.model.go.set()
        attempt.close()
        await pair.until_idle()


@pytest.mark.parametrize("ended", [{0}, {1}, {3}, {0, 1}, {0, 2, 3}, {1, 2, 3}])
@pytest.mark.parametrize("length", [8, 10])
async def test_one_that_ends_at_its_first_token_leaves_the_others_their_rows(
    ended: set[int], length: int
) -> None:
    async with running_pair() as pair:
        prompt = prompt_of(length)
        firsts = [answer[0] for answer in expected(prompt, 4, 1)]
        attempt = Attempt(
            pair, prompt, sampling(NUM_TOKENS), num_answers=4, eos=[firsts[i] for i in ended]
        )
        live = await attempt.begin()
        assert live == [i for i in range(4) if i not in ended]
        answers = await attempt.finish_all()
        whole = expected(prompt, 4)
        ends = {firsts[i] for i in ended}
        for answer in live:
            place = next((i for i, t in enumerate(whole[answer]) if t in ends), NUM_TOKENS)
            assert answers[answer] == whole[answer][: place + 1]
        await pair.until_idle()


async def test_where_all_end_at_their_first_token_nothing_is_handed_over() -> None:
    async with running_pair() as pair:
        prompt = prompt_of(9)
        firsts = [answer[0] for answer in expected(prompt, 3, 1)]
        attempt = Attempt(pair, prompt, sampling(NUM_TOKENS), num_answers=3, eos=firsts)
        assert await attempt.begin() == []
        assert attempt.first is not None
        assert {a.finish_reason for a in attempt.first.answers} == {common_pb2.FINISH_REASON_STOP}
        assert await attempt.prefill_call.read() == grpc.aio.EOF
        assert pair.p.load().kv_transfers_completed == 0
        attempt.close()
        await pair.until_idle()


async def test_one_token_each_is_prefill_alone() -> None:
    async with running_pair() as pair:
        attempt = Attempt(pair, prompt_of(9), sampling(1), num_answers=6)
        attempt.start_prefill()
        first = await attempt.first_token()
        assert [[a.token.token_id] for a in first.answers] == expected(prompt_of(9), 6, 1)
        assert all(a.finish_reason == common_pb2.FINISH_REASON_LENGTH for a in first.answers)
        await pair.until_idle()


@pytest.mark.parametrize("stopped", [0, 1, 2])
async def test_stop_ends_one_answer_and_no_other(stopped: int) -> None:
    async with running_pair() as pair:
        prompt = prompt_of(10)
        attempt = Attempt(pair, prompt, sampling(60), num_answers=3)
        await attempt.begin()
        while any(len(answer) < 5 for answer in attempt.answers.values()):
            assert await attempt.next_event() is not None
        pair.d.model.go.clear()
        await attempt.stop(stopped)
        await pair.d.until(lambda _: of_call(attempt) == 3)  # the step is under way
        pair.d.model.go.set()
        await pair.d.until(lambda _: of_call(attempt) == 2)
        answers = await attempt.finish_all()
        whole = expected(prompt, 3, 60)
        assert [len(answers[i]) for i in range(3) if i != stopped] == [60, 60]
        for answer, tokens in answers.items():
            assert tokens == whole[answer][: len(tokens)]
        await attempt.pair.until_idle()


async def test_stop_before_the_kv_has_landed_gives_its_room_back_at_once() -> None:
    async with running_pair() as pair:
        prompt = prompt_of(10)
        attempt = Attempt(pair, prompt, sampling(NUM_TOKENS), num_answers=3)
        await attempt.reserve()
        firsts = {i: answer[0] for i, answer in enumerate(expected(prompt, 3, 1))}
        await attempt.start_decode(firsts)
        assert of_call(attempt) == 3
        await attempt.stop(0)
        await pair.d.until(lambda _: of_call(attempt) == 2)
        await attempt.command(stop=worker_pb2.Stop(answer=0))  # it has ended
        attempt.start_prefill()
        await attempt.first_token()
        assert (await attempt.handoff()).WhichOneof("event") == "handoff_done"
        answers = await attempt.finish_all()
        assert [answers[i] for i in (1, 2)] == expected(prompt, 3)[1:]
        assert len(answers[0]) == 1
        await pair.until_idle()


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("num_answers", [1, 3])
async def test_stop_of_all_ends_the_call_well(num_answers: int, landed: bool) -> None:
    async with running_pair(d={"num_blocks": 400}) as pair:
        attempt = Attempt(pair, prompt_of(10), sampling(400), num_answers=num_answers)
        if landed:
            await attempt.begin()
            while attempt.num_joined == 0:
                assert await attempt.next_event() is not None
        else:
            await attempt.reserve()
            await attempt.start_decode(dict.fromkeys(range(num_answers), 1))
        attempt.answers = {i: [] for i in range(num_answers)} if not landed else attempt.answers
        for answer in range(num_answers):
            await attempt.stop(answer)
        async with asyncio.timeout(WAIT_S):
            await attempt.finish_all()
        if attempt.prefill_call is not None:
            attempt.prefill_call.cancel()
        await pair.until_idle()


async def test_a_ticket_whose_answers_were_stopped_takes_no_kv() -> None:
    async with running_pair() as pair:
        attempt = Attempt(pair, prompt_of(10), sampling(9), num_answers=2)
        await attempt.reserve()
        await attempt.start_decode({0: 1, 1: 2})
        await attempt.stop(0)
        await attempt.stop(1)
        assert await attempt.next_event() is None
        attempt.start_prefill()
        await attempt.first_token()
        event = await attempt.handoff()
        assert event.handoff_failed.decode_lost
        assert "is not open on this worker" in event.handoff_failed.reason
        await pair.until_idle()


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ({"stop": worker_pb2.Stop(answer=3)}, "stop.answer is 3, limit [0, 3)"),
        ({"stop": worker_pb2.Stop(answer=-1)}, "stop.answer is -1, limit [0, 3)"),
        ({"start": worker_pb2.Start()}, f"command is start, {EXPECTED}"),
        ({"reserve": worker_pb2.Reserve()}, f"command is reserve, {EXPECTED}"),
        ({}, f"command is None, {EXPECTED}"),
    ],
)
@pytest.mark.parametrize("landed", [False, True])
async def test_a_wrong_command_ends_the_call_and_frees_all(
    command: dict[str, object], named: str, landed: bool
) -> None:
    async with running_pair(d={"num_blocks": 400}) as pair:
        attempt = Attempt(pair, prompt_of(10), sampling(400), num_answers=3)
        if landed:
            await attempt.begin()
        else:
            await attempt.reserve()
            await attempt.start_decode({0: 1, 1: 2, 2: 3})
        await attempt.command(**command)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await attempt.finish_all()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == named
        attempt.close()
        await pair.until_idle()


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        ([], "answers is empty"),
        ([(1, 5), (1, 5)], "holds answer 1 after 1, limit (1, 3)"),
        ([(1, 5), (0, 5)], "holds answer 0 after 1, limit (1, 3)"),
        ([(3, 5)], "holds answer 3 after -1, limit (-1, 3)"),
        ([(-1, 5)], "holds answer -1 after -1"),
        ([(0, VOCAB_SIZE)], f"token id {VOCAB_SIZE}, limit [0, {VOCAB_SIZE})"),
        ([(0, -1)], "token id -1"),
    ],
)
async def test_a_wrong_start_is_refused_naming_the_answer(
    answers: list[tuple[int, int]], named: str
) -> None:
    async with running_pair() as pair:
        attempt = Attempt(pair, prompt_of(10), sampling(4), num_answers=3)
        await attempt.reserve()
        start = worker_pb2.Start()
        for answer, token in answers:
            start.answers.add(answer=answer, token_id=token)
        await attempt.command(start=start)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await attempt.decode_call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in (refused.value.details() or "")
        await pair.until_idle()


async def cancel_at(pair: Pair, point: str, attempt: Attempt) -> None:
    """Brings it to the point, and cancels it there."""
    await attempt.reserve()
    if point == "ticket":
        attempt.close()
        return
    if point == "started":
        await attempt.start_decode({1: 1, 2: 2})
        await pair.d.until(lambda _: of_call(attempt) == 2)
        attempt.close()
        return
    attempt.start_prefill()
    await attempt.first_token()
    assert (await attempt.handoff()).WhichOneof("event") == "handoff_done"
    if point == "landed":
        attempt.close()
        return
    pair.d.model.go.clear()
    await attempt.start_decode({i: answer[0] for i, answer in attempt.answers.items()})
    await pair.d.until(lambda load: load.running == 3)
    attempt.close()
    await pair.d.until(lambda _: pair.d.server._lifecycle.num_calls == 0)
    pair.d.model.go.set()


@pytest.mark.parametrize("point", ["ticket", "started", "landed", "decoding"])
@pytest.mark.parametrize("admission", ["expected", "reserve"])
async def test_cancelled_at_any_point_all_comes_back(point: str, admission: str) -> None:
    async with running_pair(d={"admission": admission}) as pair:
        for turn in range(2):  # the second time the prompt's blocks may be cached
            attempt = Attempt(pair, prompt_of(10), sampling(30), num_answers=3)
            await cancel_at(pair, point, attempt)
            await pair.until_idle()
            again = Attempt(pair, prompt_of(10), sampling(NUM_TOKENS), num_answers=3)
            await again.begin()
            whole = expected(prompt_of(10), 3)
            assert list((await again.finish_all()).values()) == whole, turn
            await pair.until_idle()


async def test_ends_at_random_moments_leak_nothing_and_answers_stay_right() -> None:
    dice = random.Random(11)
    async with running_pair(p={"num_blocks": 128}, d={"num_blocks": 60}) as pair:

        async def one(number: int) -> None:
            prompt = prompt_of(dice.randrange(1, 30), dice.randrange(3))
            n, length = dice.randrange(1, 5), dice.choice((3, 20))
            attempt = Attempt(
                pair, prompt, sampling(length), num_answers=n, request_id=f"r{number}"
            )
            attempt.arrival = number
            whole = expected(prompt, n, length)
            await attempt.begin()
            for _ in range(dice.randrange(25)):
                if await attempt.next_event() is None:
                    break
                if attempt.open and dice.random() < 0.1:
                    await attempt.stop(dice.choice(sorted(attempt.open)))
            else:
                if dice.random() < 0.4:
                    attempt.close()
                    return
                await attempt.finish_all()
            for answer, tokens in attempt.answers.items():
                assert tokens == whole[answer][: len(tokens)]

        for batch in range(4):
            await asyncio.gather(*(one(batch * 12 + i) for i in range(12)))
            await pair.until_idle()


async def test_draining_finishes_all_answers() -> None:
    async with running_pair() as pair:
        attempt = Attempt(pair, prompt_of(10), sampling(NUM_TOKENS), num_answers=3)
        await attempt.reserve()
        await pair.d.control.Drain(worker_pb2.DrainRequest(), timeout=10)
        attempt.start_prefill()
        await attempt.first_token()
        await attempt.start_decode({i: answer[0] for i, answer in attempt.answers.items()})
        assert list((await attempt.finish_all()).values()) == expected(prompt_of(10), 3)
        assert await pair.d.server.drain(10)
        await pair.until_idle()


@pytest.mark.parametrize("landed", [False, True])
async def test_the_end_of_the_worker_ends_the_call(landed: bool) -> None:
    async with running_pair(d={"num_blocks": 400}) as pair:
        attempt = Attempt(pair, prompt_of(10), sampling(400), num_answers=3)
        if landed:
            await attempt.begin()
        else:
            await attempt.reserve()
            await attempt.start_decode({0: 1, 1: 2, 2: 3})
        await pair.d.server.stop(0)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await attempt.finish_all()
        attempt.close()
        tickets = pair.d.server.node.tickets
        assert len(tickets) == 0
        if not landed:  # else they were the engine's, which has ended
            assert len(tickets._ledger) == 0
            assert pair.d.server.node.pool.usage().available == 400
        await pair.p.until_idle()


async def crowded(pair: Pair) -> list[Attempt]:
    """Three requests of two answers each, let in because answers were short of late: each alone
    needs almost the whole pool of 16 blocks.
    """
    for _ in range(600):
        pair.d.server.node.tickets._ledger.record(2)
    attempts = []
    for salt in range(3):
        params = sampling(24, seed=10 * salt)
        attempt = Attempt(
            pair, prompt_of(12, salt), params, num_answers=2, request_id=f"r{salt}", arrival=salt
        )
        attempts.append(attempt)
    pair.d.model.go.clear()  # until all are there
    for attempt in attempts:
        assert await attempt.begin() == [0, 1]
    pair.d.model.go.set()
    return attempts


async def test_preempted_answers_go_on_in_attempts_of_their_own() -> None:
    # No host memory, so who yields is returned.
    async with running_pair(d={"num_blocks": 16, "swap_memory_bytes": 0}) as pair:
        attempts = await crowded(pair)
        await asyncio.gather(*(attempt.finish_all() for attempt in attempts))
        num_returned = 0
        for attempt in attempts:
            for answer, tokens in attempt.answers.items():
                seed = attempt.params.seed + answer
                whole = MODEL.expected(attempt.prompt, 24, seed)
                if answer not in attempt.preempted:
                    assert tokens == whole
                    continue
                assert tokens == whole[: len(tokens)]
                alone = Attempt(
                    pair, attempt.prompt, sampling(24, seed=seed), emitted=tokens, attempt=1
                )
                alone.num_preemptions = attempt.preempted[answer]
                assert await alone.run() == whole
                assert alone.num_preemptions >= attempt.preempted[answer] == 1
                num_returned += 1
        load = pair.d.load()
        assert load.preemptions == load.preemptions_returned == num_returned > 0
        assert load.swap_total_blocks == 0
        await pair.until_idle()


async def test_swapped_answers_come_back_and_say_so() -> None:
    settings = {"num_blocks": 16, "swap_memory_bytes": 64 * 4 * BYTES_PER_ROW}
    async with running_pair(d=settings) as pair:
        attempts = await crowded(pair)
        swaps: dict[tuple[str, int], int] = {}

        async def watch(attempt: Attempt) -> None:
            while (event := await attempt.next_event()) is not None:
                if event.WhichOneof("event") == "tokens":
                    swaps[attempt.key.request_id, event.tokens.answer] = event.tokens.swaps

        await asyncio.gather(*(watch(attempt) for attempt in attempts))
        for attempt in attempts:
            for answer, tokens in attempt.answers.items():
                seed = attempt.params.seed + answer
                assert tokens == MODEL.expected(attempt.prompt, 24, seed)
        load = pair.d.load()
        returned = sum(sum(attempt.preempted.values()) for attempt in attempts)
        assert (load.preemptions_returned, returned) == (0, 0)
        assert load.preemptions == sum(swaps.values()) > 0
        assert load.swap_total_blocks == 64
        await pair.until_idle()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_answers": 129}, "num_answers is 129, limit [0, 128]"),
        ({"num_answers": -1}, "num_answers is -1, limit [0, 128]"),
        ({"num_answers": 2, "num_prompt_tokens": 9}, "limit 1, for each answer has its own"),
        ({"priority": 9}, "priority is 9, limit [0, 2]"),
        ({"num_preemptions": -1}, "num_preemptions must not be negative, got -1"),
        ({"cache_salt": "x" * 257}, "cache_salt has 257 bytes, limit 256"),
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": [VOCAB_SIZE] * 10}, f"token id {VOCAB_SIZE}"),
        ({"eos_token_ids": [-1]}, "eos_token_ids holds token id -1"),
        ({"num_prompt_tokens": 11}, "num_prompt_tokens is 11, limit [1, 10]"),
        ({"num_prompt_tokens": 7}, "3 emitted tokens and prefill gives one more"),
        ({"sampling": sampling(1)}, "nothing is left to decode"),
        ({"sampling": sampling(503)}, "exceed the context of 512"),
        ({"sampling": sampling(4, top_p=2.0)}, "sampling.top_p is 2.0"),
        ({"sampling": common_pb2.SamplingParams()}, "sampling.max_tokens is not set"),
    ],
)
async def test_a_wrong_reserve_is_refused_naming_the_field(
    change: dict[str, object], named: str
) -> None:
    async with running_pair() as pair:
        attempt = Attempt(pair, prompt_of(10), sampling(4))
        reserve = attempt.reserve_message()
        for name, value in change.items():
            if isinstance(value, list):
                reserve.ClearField(name)  # type: ignore[arg-type]  # a field's name
                getattr(reserve, name).extend(value)
            elif isinstance(value, common_pb2.SamplingParams):
                reserve.sampling.CopyFrom(value)
            else:
                setattr(reserve, name, value)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await attempt.reserve_once(reserve)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in (refused.value.details() or "")
        assert pair.d.load().reserved_blocks == 0
        await pair.until_idle()


async def test_answers_that_can_never_fit_together_are_refused_with_the_numbers() -> None:
    async with running_pair(d={"num_blocks": 8}) as pair:
        attempt = Attempt(pair, prompt_of(9), sampling(8), num_answers=4)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await attempt.reserve_once()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert refused.value.details() == (
            "16 rows of KV for each of 4 answers need 10 blocks of 4 tokens; "
            "this worker has 8 in all"
        )
        fits = Attempt(pair, prompt_of(9), sampling(8), num_answers=3)  # 2 shared, 2 each
        await fits.begin()
        assert list((await fits.finish_all()).values()) == expected(prompt_of(9), 3, 8)
        await pair.until_idle()
