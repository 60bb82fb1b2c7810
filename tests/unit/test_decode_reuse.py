"""A decode worker that holds a prompt's beginning is sent only the rest."""

from __future__ import annotations

import pytest
from fake_engine import VOCAB_SIZE
<<<<<<< HEAD
from kv_push import (
    MODEL,
    PROMPT,
    Ack,
    Push,
    Stream,
    all_chunks,
    begin,
    chunk,
    commit,
    decoded,
    reserved,
)
from worker_pair import Attempt, Pair, Worker, running_pair, running_worker, sampling

from legato.kernels.crc32c import crc32c

if TYPE_CHECKING:
    from legato.protos import worker_pb2
=======
from worker_pair import Attempt, Pair, running_pair, sampling
>>>>>>> h-recv

ROW_BYTES = 3 * 64  # of all layers


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 37 + salt * 101 + 5) % VOCAB_SIZE for i in range(length)]


async def ask(
    pair: Pair, prompt: list[int], max_tokens: int = 6, *, num_answers: int = 1, salt: str = ""
) -> int:
    """Checks the answer and the bytes on the wire; returns how many tokens were not sent."""
    before = pair.d.load().kv_bytes_received
    params = sampling(max_tokens)
    attempt = Attempt(pair, prompt, params, num_answers=num_answers, cache_salt=salt)
    if num_answers == 1:
        assert await attempt.run() == pair.p.model.expected(prompt, max_tokens)
    else:
        await attempt.begin()
        answers = await attempt.finish_all()
        for seed, answer in answers.items():
            assert answer == pair.p.model.expected(prompt, max_tokens, seed)
    reused = attempt.handed_over.reused_tokens
    sent = (len(prompt) - reused) * ROW_BYTES
    assert attempt.handed_over.kv_bytes == sent
    assert pair.d.load().kv_bytes_received - before == sent
    return int(reused)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 17])
@pytest.mark.parametrize("num_answers", [1, 3])
async def test_full_blocks_are_sent_once(length: int, num_answers: int) -> None:
    async with running_pair() as pair:
        prompt = prompt_of(length)
        assert await ask(pair, prompt, num_answers=num_answers) == 0
        # A prompt of exactly k blocks is all there: then no row is sent, and none is too few.
        for _ in range(2):
            assert await ask(pair, prompt, num_answers=num_answers) == length // 4 * 4
        await pair.until_idle()


async def test_prompts_share_what_they_begin_with_and_nothing_after_a_difference() -> None:
    async with running_pair() as pair:
        base = prompt_of(24)
        await ask(pair, base)
        for same in (0, 3, 4, 11, 12, 23):
            other = base[:same] + [(t + 1) % VOCAB_SIZE for t in base[same:]]
            assert await ask(pair, other) == same // 4 * 4, same
        assert await ask(pair, base[4:]) == 0
        await pair.until_idle()


async def test_the_next_turn_is_sent_neither_prompt_nor_answer() -> None:
    async with running_pair() as pair:
        first = prompt_of(10)
        answer = pair.p.model.expected(first, 16)
        await ask(pair, first, 16)
        # Of 10 + 16 tokens all but the last have a row: 25, 6 full blocks.
        assert await ask(pair, [*first, *answer, *prompt_of(7, salt=3)]) == 24
        await pair.until_idle()


async def test_each_salt_has_blocks_of_its_own() -> None:
    async with running_pair() as pair:
        prompt = prompt_of(20)
        assert await ask(pair, prompt, salt="a") == 0
        assert await ask(pair, prompt, salt="b") == 0
        assert await ask(pair, prompt) == 0
        assert await ask(pair, prompt, salt="a") == 20
        await pair.until_idle()


async def test_without_the_cache_all_is_sent() -> None:
    async with running_pair(d={"prefix_cache": False}) as pair:
        for _ in range(2):
            assert await ask(pair, prompt_of(20)) == 0
        load = pair.d.load()
        assert (load.cached_blocks, load.prefix_blocks_asked) == (0, 0)
        await pair.until_idle()


async def test_blocks_of_another_size_are_found_all_the_same() -> None:
    async with running_pair(d={"block_size": 6}) as pair:
        assert await ask(pair, prompt_of(20)) == 0
        assert await ask(pair, prompt_of(20)) == 18
        await pair.until_idle()


async def test_a_small_pool_gives_cached_blocks_up_and_answers_stay_right() -> None:
    async with running_pair(d={"num_blocks": 11}) as pair:
        hits = 0
        for turn in range(40):
            prompt = prompt_of(5 + turn * 7 % 30, salt=turn // 2 % 5)
            hits += await ask(pair, prompt)
        load = pair.d.load()
        assert hits == load.prefix_blocks_hit * 4 > 0
        assert load.prefix_blocks_evicted > 20
        await pair.until_idle()


async def test_a_prompt_that_is_all_there_commits_without_a_chunk() -> None:
    async with running_pair() as pair:
        prompt = prompt_of(12)
        await ask(pair, prompt)
        attempt = Attempt(pair, prompt, sampling(9), request_id="again")
        await attempt.reserve()
        attempt.start_prefill()
        await attempt.first_token()
        done = (await attempt.handoff()).handoff_done
        assert (done.kv_bytes, done.reused_tokens) == (0, 12)
        attempt.close()
        await pair.until_idle()
        assert await ask(pair, prompt, 9) == 12
