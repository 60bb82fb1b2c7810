"""Prompts that begin alike share KV on a prefill worker; a model that sees every row checks it."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_engine import VOCAB_SIZE
from worker_pair import WAIT_S, Attempt, Pair, running_pair, sampling

from legato.worker.engine import Engine

BLOCK = 4


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 37 + salt * 101 + 5) % VOCAB_SIZE for i in range(length)]


async def ask(pair: Pair, prompt: list[int], max_tokens: int = 6, cache_salt: str = "") -> int:
    """Checks the answer; returns how many tokens were cached."""
    attempt = Attempt(pair, prompt, sampling(max_tokens), cache_salt=cache_salt)
    assert await attempt.run() == pair.p.model.expected(prompt, max_tokens)
    assert attempt.first is not None
    return attempt.first.cached_tokens


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16, 17, 33])
async def test_a_prompt_sent_again_is_computed_from_its_last_full_block_on(length: int) -> None:
    async with running_pair() as pair:
        assert await ask(pair, prompt_of(length)) == 0
        # Of a prompt of exactly k blocks, the last one is computed: its logits are wanted.
        cached = (length - 1) // BLOCK * BLOCK
        assert await ask(pair, prompt_of(length)) == cached
        assert await ask(pair, prompt_of(length), max_tokens=1) == cached
        assert pair.p.load().prefill_tokens == 3 * length - 2 * cached
        await pair.until_idle()


async def test_prompts_share_what_they_begin_with_and_nothing_after_a_difference() -> None:
    async with running_pair() as pair:
        base = prompt_of(24)
        await ask(pair, base)
        for same in (0, 3, 4, 11, 12, 23):
            other = base[:same] + [(t + 1) % VOCAB_SIZE for t in base[same:]]
            assert await ask(pair, other) == same // BLOCK * BLOCK, same
        assert await ask(pair, base + prompt_of(9, salt=7)) == 24
        # The same tokens elsewhere are other KV.
        assert await ask(pair, base[4:]) == 0
        await pair.until_idle()


async def test_chunked_prompts_are_cached_as_far_as_they_were_computed() -> None:
    async with running_pair(p={"prefill_chunk_tokens": 6}) as pair:
        assert await ask(pair, prompt_of(33)) == 0
        assert await ask(pair, prompt_of(33)) == 32
        prompt = prompt_of(40, salt=1)
        first = Attempt(pair, prompt, sampling(4), request_id="cut")
        await first.reserve()
        pair.p.model.go.clear()
        pair.p.model.inside.clear()
        steps = pair.p.load().prefill_steps
        first.start_prefill()
        await asyncio.to_thread(pair.p.model.inside.wait, 20)
        first.close()  # within its first chunk
        async with asyncio.timeout(WAIT_S):
            while pair.p.server.node.lifecycle.num_calls:  # noqa: ASYNC110  # it sets no event
                await asyncio.sleep(0.005)
        pair.p.model.go.set()
        await pair.until_idle()
        done = pair.p.load().prefill_steps - steps
        assert done == 1
        assert await ask(pair, prompt) == 4
        await pair.until_idle()


async def test_each_salt_has_a_cache_of_its_own() -> None:
    async with running_pair() as pair:
        prompt = prompt_of(20)
        assert await ask(pair, prompt, cache_salt="a") == 0
        assert await ask(pair, prompt, cache_salt="b") == 0
        assert await ask(pair, prompt) == 0
        assert await ask(pair, prompt, cache_salt="a") == 16
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(pair, prompt, max_tokens=1, cache_salt="x" * 257)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "cache_salt has 257 bytes, limit 256" in (caught.value.details() or "")
        await pair.until_idle()


async def test_cached_blocks_make_room_and_answers_stay_right() -> None:
    async with running_pair(p={"num_blocks": 9}) as pair:
        hits = 0
        for turn in range(40):
            prompt = prompt_of(5 + turn * 7 % 30, salt=turn // 2 % 5)
            hits += await ask(pair, prompt)
        await pair.until_idle()
        load = pair.p.load()
        assert hits == load.prefix_blocks_hit * BLOCK > 0
        assert load.prefix_blocks_evicted > 20
        assert load.prefix_blocks_asked > load.prefix_blocks_hit
        assert load.cached_blocks <= load.free_blocks == load.total_blocks == 9


async def test_prompts_that_run_at_once_share_blocks_and_any_may_end_first() -> None:
    async with running_pair() as pair:
        base = prompt_of(16)
        await ask(pair, base)
        prompts = [base + prompt_of(3 + i, salt=i) for i in range(6)]
        attempts = [
            Attempt(pair, prompt, sampling(5), request_id=f"r{i}")
            for i, prompt in enumerate(prompts)
        ]
        cancelled = Attempt(pair, prompts[0], sampling(5), request_id="gone")
        await cancelled.reserve()
        pair.p.model.go.clear()
        pair.p.model.inside.clear()
        cancelled.start_prefill()
        await asyncio.to_thread(pair.p.model.inside.wait, 20)
        runs = [asyncio.create_task(attempt.run()) for attempt in attempts]
        await pair.p.until(lambda load: load.waiting == len(attempts))
        cancelled.close()
        pair.p.model.go.set()
        for prompt, answer in zip(prompts, await asyncio.gather(*runs), strict=True):
            assert answer == pair.p.model.expected(prompt, 5)
        assert all(a.first is not None and a.first.cached_tokens == 16 for a in attempts)
        await pair.until_idle()


async def test_a_replayed_answer_finds_its_prompt() -> None:
    async with running_pair() as pair:
        prompt = prompt_of(18)
        whole = pair.p.model.expected(prompt, 10)
        await ask(pair, prompt)
        again = Attempt(pair, prompt, sampling(10), attempt=1, emitted=whole[:4])
        assert await again.run() == whole
        assert again.first is not None
        assert again.first.cached_tokens == 16
        await pair.until_idle()


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_prompt_without_usable_logits_leaves_nothing_in_the_cache(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = {**(Engine.__init__.__kwdefaults__ or {}), "overlap": overlap}
    monkeypatch.setattr(Engine.__init__, "__kwdefaults__", defaults)
    async with running_pair(p={"prefill_chunk_tokens": 6}) as pair:
        base, bad = prompt_of(17), VOCAB_SIZE - 1
        pair.p.model.breaks_after = {bad}
        for prompt in (prompt_of(9, salt=1), base[:16] + prompt_of(9, salt=1)):
            assert await ask(pair, base) == 0
            broken = Attempt(pair, [*prompt, bad], sampling(2))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await broken.run()
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            broken.close()
            await pair.until_idle()
            assert await ask(pair, [*prompt, 1]) == 0
            # A neighbour that it did not begin like is still there.
            assert await ask(pair, base) == 16
            await pair.until_idle()
            pair.p.server.node.pool.forget_cached()


async def test_without_the_cache_every_prompt_is_computed() -> None:
    async with running_pair(p={"prefix_cache": False}) as pair:
        for _ in range(2):
            assert await ask(pair, prompt_of(20)) == 0
        load = pair.p.load()
        assert (load.prefill_tokens, load.cached_blocks, load.prefix_blocks_asked) == (40, 0, 0)
        await pair.until_idle()
