"""Steps that start before the tokens of the step before are read, as on a CUDA device."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import worker_pair
from fake_engine import VOCAB_SIZE, ReadTokens, fake_sample
from worker_pair import Attempt, running_pair, sampling

from legato.worker.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from legato.worker.logits import Logits
    from legato.worker.sampler import Sampled, SamplingRow


@dataclass(frozen=True)
class LoggedTokens:
    log: list[str]
    number: int
    tokens: ReadTokens

    @property
    def token_ids(self) -> Tensor:
        return self.tokens.token_ids

    def collect(self) -> list[Sampled | None]:
        self.log.append(f"read {self.number}")
        return self.tokens.collect()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Both engines overlap; the decode engine's steps are logged as they start and are read."""
    entries: list[str] = []

    def logged_sample(logits: Logits, rows: Sequence[SamplingRow]) -> ReadTokens | LoggedTokens:
        tokens = fake_sample(logits, rows)
        if not rows[0].index:
            return tokens  # of the prefill worker
        number = sum(entry.startswith("start") for entry in entries)
        entries.append(f"start {number}")
        return LoggedTokens(entries, number, tokens)

    defaults = {**(Engine.__init__.__kwdefaults__ or {}), "overlap": True}
    monkeypatch.setattr(Engine.__init__, "__kwdefaults__", defaults)
    monkeypatch.setattr(worker_pair, "fake_sample", logged_sample)
    return entries


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 37 + salt * 101 + 5) % VOCAB_SIZE for i in range(length)]


async def test_a_step_starts_before_the_tokens_of_the_last_are_read(log: list[str]) -> None:
    async with running_pair() as pair:
        answer = await Attempt(pair, prompt_of(10), sampling(5)).run()
        assert answer == pair.p.model.expected(prompt_of(10), 5)
        await pair.until_idle()
    assert log == [
        "start 0",
        "start 1",
        "read 0",
        "start 2",
        "read 1",
        "start 3",
        "read 2",
        "read 3",
    ]


async def test_an_answer_that_ends_early_wastes_one_row_and_delivers_nothing_more(
    log: list[str],
) -> None:
    async with running_pair() as pair:
        expected = pair.p.model.expected(prompt_of(9), 12)
        place = next(i for i in range(3, 12) if expected[i] not in expected[:i])
        attempt = Attempt(pair, prompt_of(9), sampling(12), eos=[expected[place]])
        assert await attempt.run() == expected[: place + 1]
        await pair.until_idle()
        assert pair.d.load().decode_steps == place + 1  # one more than the answer needed
    assert log[-1] == f"read {place}"


async def test_penalties_need_the_last_token_and_keep_steps_apart(log: list[str]) -> None:
    async with running_pair() as pair:
        await Attempt(pair, prompt_of(10), sampling(5, presence_penalty=0.5)).run()
        await pair.until_idle()
    assert log == [f"{what} {number}" for number in range(4) for what in ("start", "read")]


async def test_blocks_stay_held_while_a_step_under_way_writes_to_them(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pair() as pair:
        node = pair.d.server.node
        held_at_read: list[tuple[int, int]] = []  # (sequences in the schedule, blocks held)
        collect = LoggedTokens.collect

        def probe(tokens: LoggedTokens) -> list[Sampled | None]:
            held_at_read.append((node.engine.stats().running, node.pool.usage().held))
            return collect(tokens)

        monkeypatch.setattr(LoggedTokens, "collect", probe)
        attempt = Attempt(pair, prompt_of(10), sampling(50))
        await attempt.reserve()
        attempt.start_prefill()
        await attempt.first_token()
        await attempt.start_decode()
        await attempt.handoff()
        await pair.d.until(lambda load: load.decode_steps >= 2)
        attempt.close()
        await pair.until_idle()
        running, held = held_at_read[-1]
        assert running == 0  # the sequence had left when the last step was read
        assert held > 0
        assert node.pool.usage().held == 0


async def test_many_streams_keep_their_own_answers(log: list[str]) -> None:
    async with running_pair(d={"max_batch_size": 3}) as pair:
        prompts = [prompt_of(5 + i, salt=i) for i in range(7)]
        attempts = [
            Attempt(pair, p, sampling(9 + i), request_id=f"r{i}") for i, p in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(a.run() for a in attempts))
        for i, (answer, prompt) in enumerate(zip(answers, prompts, strict=True)):
            assert answer == pair.p.model.expected(prompt, 9 + i), i
        await pair.until_idle()
