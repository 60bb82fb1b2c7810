"""A decode worker that lets in too many: whoever is swapped, returned, stopped or cancelled."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import cache

import pytest
from fake_engine import VOCAB_SIZE, FakeModel, fake_config
from worker_pair import Attempt, Pair, running_pair, sampling

from legato.protos import common_pb2

MODEL = FakeModel(fake_config())
NUM_BLOCKS = 30
BLOCK_BYTES = 4 * 3 * 2 * 2 * 4 * 4  # rows, layers, K and V, heads, head_dim, fp32


@cache
def expected(prompt: tuple[int, ...], num_tokens: int, seed: int) -> list[int]:
    return MODEL.expected(prompt, num_tokens, seed)


def prompt_of(length: int, salt: int) -> list[int]:
    return [(i * 37 + salt * 101 + 5) % VOCAB_SIZE for i in range(length)]


class Client:
    """One request: what it asks for and what becomes of it are drawn."""

    def __init__(self, pair: Pair, dice: random.Random, number: int) -> None:
        prompt = prompt_of(dice.randrange(1, 30), dice.randrange(3))
        self.num_tokens = dice.choice((3, 20, 30))
        most = (NUM_BLOCKS - 2 - len(prompt) // 4) // 8  # each may need 8 blocks of its own
        self.attempt = Attempt(
            pair,
            prompt,
            sampling(self.num_tokens, seed=dice.randrange(5)),
            num_answers=min(dice.randrange(1, 4), most),
            request_id=f"r{number}",
            arrival=number,
            priority=dice.choice((common_pb2.PRIORITY_INTERACTIVE, common_pb2.PRIORITY_BATCH)),
        )
        self.cancels = dice.random() < 0.2
        self.stops = dice.random() < 0.3
        self.patience = dice.randrange(25)  # events until it does so

    async def run(self) -> Counter[str]:
        attempt = self.attempt
        stopped: set[int] = set()
        await attempt.begin()
        if self.cancels or self.stops:
            for _ in range(self.patience):
                if await attempt.next_event() is None:
                    break
        if self.cancels:
            attempt.close()
            return Counter(cancelled=1)
        if self.stops and attempt.open:
            stopped.add(min(attempt.open))
            await attempt.stop(min(attempt.open))
        await attempt.finish_all()
        for answer, tokens in attempt.answers.items():
            seed = attempt.params.seed + answer
            whole = expected(tuple(attempt.prompt), self.num_tokens, seed)
            if answer in attempt.preempted:
                await self._go_on(answer, tokens, whole)
            elif answer in stopped:
                assert tokens == whole[: len(tokens)]
            else:
                assert tokens == whole
        return Counter(stopped=len(stopped), returned=len(attempt.preempted), finished=1)

    async def _go_on(self, answer: int, tokens: list[int], whole: list[int]) -> None:
        """As the router does with an answer that had to leave."""
        attempt = self.attempt
        assert tokens == whole[: len(tokens)]
        alone = Attempt(
            attempt.pair,
            attempt.prompt,
            sampling(self.num_tokens, seed=attempt.params.seed + answer),
            emitted=tokens,
            attempt=1 + answer,
            request_id=attempt.key.request_id,
            arrival=attempt.arrival,
            priority=attempt.priority,
        )
        alone.num_preemptions = attempt.preempted[answer]
        assert await alone.run() == whole


@pytest.mark.parametrize("num_slots", [0, 9, 100])
async def test_every_answer_is_right_and_nothing_leaks(num_slots: int) -> None:
    dice = random.Random(num_slots)
    settings = {"num_blocks": NUM_BLOCKS, "swap_memory_bytes": num_slots * BLOCK_BYTES}
    fates: Counter[str] = Counter()
    async with running_pair(p={"num_blocks": 200}, d=settings) as pair:
        for _ in range(600):  # answers were short of late, these are not: too many come in
            pair.d.server.node.tickets._ledger.record(3)
        for crowd in range(3):
            clients = [Client(pair, dice, crowd * 16 + i) for i in range(16)]
            for fate in await asyncio.gather(*(client.run() for client in clients)):
                fates.update(fate)
            await pair.until_idle()
        load = pair.d.load()
        assert load.swap_total_blocks == num_slots
        assert load.preemptions > 10
        swapped = load.preemptions - load.preemptions_returned
        assert (swapped > 0) == (num_slots > 0)
        assert (load.preemptions_returned > 0) == (num_slots < 100)
        assert load.prefix_blocks_hit > 0
        wanted = {"cancelled", "stopped", "finished"} | ({"returned"} if num_slots < 100 else set())
        assert {fate for fate, count in fates.items() if count} == wanted
