"""Prompts that the decode engine computes itself: answers have the bits they have elsewhere."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from engine_pair import BLOCK_SIZE, running_engines
from kernel_paths import needs_native
from model_checks import build
from tiny_models import VOCAB_SIZE, make_model

from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.live import claim_of
from legato.worker.scheduling.preemption import Preemption

if TYPE_CHECKING:
    from legato.worker.forward import Model
    from legato.worker.sampler import Sampled
    from legato.worker.scheduling.decision import Decision
    from legato.worker.sequence import Sequence

    Requests = list[tuple[list[int], SamplingParams]]

# The portable ops' sums depend on the batch: there is nothing to compare bit by bit.
pytestmark = needs_native
overlapping = pytest.mark.parametrize("overlap", [False, True], ids=["apart", "overlapping"])
mixing = pytest.mark.parametrize("mixes", [True, False], ids=["mixed", "in-turn"])
DRAWN = replace(
    SamplingParams.greedy_for(1, ignore_eos=True), temperature=0.9, top_p=0.95, logprobs=3
)


def crowd(count: int, lengths: tuple[int, ...]) -> Requests:
    draw = random.Random(9)
    return [
        (
            [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice(lengths))],
            replace(
                DRAWN,
                max_tokens=draw.choice((2, 9, 30)),
                seed=draw.getrandbits(63),
                presence_penalty=0.5 if number % 4 == 3 else 0.0,
            ),
        )
        for number in range(count)
    ]


async def alone(model: Model, requests: Requests) -> list[list[Sampled]]:
    """Each by itself, prefilled whole by the prefill engine."""
    async with running_engines(model) as pair:
        return [(await pair.ask(*request))[0].sampled for request in requests]


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma3"])
def all_alone(request: pytest.FixtureRequest) -> tuple[Model, Requests, list[list[Sampled]]]:
    model = build(make_model(request.param))
    requests = crowd(14, (1, 3, 31, 32, 33, 150, 300))  # pieces of 32, attention in parts of 256
    return model, requests, asyncio.run(alone(model, requests))


@overlapping
@mixing
async def test_all_have_the_bits_that_they_have_alone(
    all_alone: tuple[Model, Requests, list[list[Sampled]]], overlap: bool, mixes: bool
) -> None:
    model, requests, right = all_alone
    async with running_engines(model, overlap=overlap, mixes_prompts=mixes) as pair:
        asking = [pair.ask(*r, local=number % 3 > 0) for number, r in enumerate(requests)]
        answers = [answer for [answer] in await asyncio.gather(*asking)]
        assert [answer.sampled for answer in answers] == right
        assert all(answer.num_joined == 1 for answer in answers)
        await pair.check_all_is_back()
        figures = pair.decode.stats().local_prefill
        assert figures.num_tokens == sum(len(p) for n, (p, _) in enumerate(requests) if n % 3)


@overlapping
@mixing
@pytest.mark.parametrize("num_slots", [0, 400], ids=["return", "swap"])
@pytest.mark.parametrize("all_alone", ["llama"], indirect=True)
async def test_those_that_yield_with_half_a_prompt_lose_nothing(
    all_alone: tuple[Model, Requests, list[list[Sampled]]],
    num_slots: int,
    overlap: bool,
    mixes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half_done: list[Sequence] = []
    make_room = Preemption.make_room

    def harsh(
        preemption: Preemption,
        takers: list[Sequence],
        plan: Decision,
        hand: list[int],
        now: float,
    ) -> bool:
        """Everybody yields once, between two pieces of the prompt."""
        for victim in [s for s in takers if s in preemption._live.prompts and s.num_computed]:
            if claim_of(victim).num_preemptions == 0:
                preemption._preempt(victim, plan, hand, 0, now)
                takers.remove(victim)
                half_done.append(victim)
        return make_room(preemption, takers, plan, hand, now) or victim_of(plan)

    def victim_of(plan: Decision) -> bool:
        return bool(plan.swap_outs or plan.returned)

    monkeypatch.setattr(Preemption, "make_room", harsh)
    model, requests, right = all_alone
    async with running_engines(
        model,
        num_blocks=190,
        num_slots=num_slots,
        overlap=overlap,
        mixes_prompts=mixes,
        prior_tokens=2,
        risk=0.9,
        prefix_cache=True,
    ) as pair:
        asking = [pair.ask(*request, local=True) for request in requests]
        answers = [answer for [answer] in await asyncio.gather(*asking)]
        assert len(half_done) >= 3
        if num_slots:
            assert sum(answer.num_swaps for answer in answers) >= len(half_done)
            assert [answer.sampled for answer in answers] == right
        assert [a.token_ids for a in answers] == [[t.token_id for t in r] for r in right]
        await pair.check_all_is_back()
        assert pair.decode.stats().waiting_tokens == 0


@overlapping
async def test_a_cached_beginning_is_not_computed_again(overlap: bool) -> None:
    model = build(make_model("llama"))
    prompt = [(i * 7 + 3) % VOCAB_SIZE for i in range(10 * BLOCK_SIZE)]
    params = replace(DRAWN, max_tokens=9)
    [right] = await alone(model, [(prompt, params)])
    async with running_engines(model, overlap=overlap, prefix_cache=True) as pair:
        computed: list[int] = []
        for _ in range(3):
            before = pair.decode.stats().local_prefill.num_tokens
            [answer] = await pair.ask(prompt, params, local=True)
            assert answer.sampled == right
            await pair.check_all_is_back()
            computed.append(pair.decode.stats().local_prefill.num_tokens - before)
        # Of a prompt that is found whole the last block is computed all the same.
        assert computed == [10 * BLOCK_SIZE, BLOCK_SIZE, BLOCK_SIZE]
        # Those that were handed over find what was computed here, and the other way round.
        pair.num_found = 0
        [answer] = await pair.ask(prompt, params)
        assert pair.num_found == 10
        assert answer.token_ids == [token.token_id for token in right]
        next_turn = [*prompt, *answer.token_ids, 5]
        pair.num_found = 0
        [second] = await pair.ask(next_turn, params, local=True)
        assert pair.num_found == (len(prompt) + 8) // BLOCK_SIZE
        await pair.check_all_is_back()
    [expected] = await alone(model, [(next_turn, params)])
    assert second.sampled == expected


async def test_running_streams_get_their_tokens_while_a_long_prompt_is_computed() -> None:
    model = build(make_model("llama"))
    stream, long = [5, 6, 7], [(i * 11) % VOCAB_SIZE for i in range(300)]
    async with running_engines(model) as pair:
        sizes: list[list[int]] = []
        schedule = pair.scheduler.schedule

        def noted(now: float) -> Decision | None:
            decision = schedule(now)
            if decision is not None:
                sizes.append([part.num_tokens for part in decision.parts])
            return decision

        pair.scheduler.schedule = noted  # type: ignore[method-assign]  # a probe
        asking = asyncio.create_task(pair.ask(stream, replace(DRAWN, max_tokens=200)))
        await pair.until(lambda: pair.decode.stats().steps > 3)
        await pair.ask(long, replace(DRAWN, max_tokens=2), local=True)
        await asking
    pieces = [size for size in sizes if max(size) > 1]
    assert pieces == [[1, 32]] * 9 + [[1, 12]]
