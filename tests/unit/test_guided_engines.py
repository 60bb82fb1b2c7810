"""Guides in real engines, in a crowd: preempted, returned, parked, and with steps that overlap."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from engine_pair import BLOCK_SIZE, EnginePair, running_engines
from guide_cases import CASES, Case
from model_checks import build
from tiny_models import EOS, VOCAB_SIZE, make_llama, write_byte_tokenizer

from legato.text.guide_book import GuideBook
from legato.text.guide_vocabulary import GuideVocabulary
from legato.worker.sampling_params import SamplingParams
from legato.worker.sequence import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.worker.forward import Model
    from legato.worker.sampler import Sampled

NUM_REQUESTS = 48
SAMPLED = replace(SamplingParams.greedy_for(1), temperature=4.0, top_p=0.98)
overlapping = pytest.mark.parametrize("overlap", [False, True], ids=["apart", "overlapping"])
Request = tuple[list[int], SamplingParams, "Case | None"]


@pytest.fixture(scope="module")
def model() -> Model:
    return build(make_llama())


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> GuideBook:
    folder = tmp_path_factory.mktemp("text")
    write_byte_tokenizer(folder)
    return GuideBook(lambda: GuideVocabulary.load(folder, VOCAB_SIZE), probe=lambda _: None)


def crowd() -> list[Request]:
    """Each third has no guide; all ways to choose a token, in turn."""
    draw = random.Random(11)
    requests: list[Request] = []
    for number in range(NUM_REQUESTS):
        case = None if number % 3 == 2 else CASES[number % len(CASES)]
        max_tokens = draw.choice((12, 40, 60))
        seeded = replace(SAMPLED, max_tokens=max_tokens, seed=draw.getrandbits(63))
        params = (
            SamplingParams.greedy_for(max_tokens),
            seeded,
            replace(seeded, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
            replace(seeded, logprobs=3, temperature=0.9),
            replace(seeded, min_tokens=max_tokens // 2),
            replace(seeded, ignore_eos=True, logit_bias={65: 3.0}),
            replace(SamplingParams.greedy_for(max_tokens), ignore_eos=True),
        )[number % 7]
        params = replace(params, guide=None if case is None else case.guide)
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 30))]
        requests.append((prompt, params, case))
    return requests


def guided(pair: EnginePair, book: GuideBook) -> EnginePair:
    pair.guides, pair.eos = book, frozenset({EOS})
    return pair


def check(params: SamplingParams, case: Case | None, tokens: list[int], why: FinishReason) -> None:
    """What ended keeps to its guide; what was cut off is as long as it may be."""
    if why is FinishReason.STOP:
        assert tokens[-1] == EOS
        text = bytes(tokens[:-1]).decode("utf-8", errors="replace") if case else ""
        assert case is None or case.keeps(text), (case, text)
    else:
        assert len(tokens) == params.max_tokens
        assert case is None or EOS not in tokens


@pytest.fixture(scope="module")
def alone(model: Model, book: GuideBook) -> list[list[Sampled]]:
    """The crowd's answers, each got by itself."""

    async def run() -> list[list[Sampled]]:
        async with running_engines(model) as pair:
            guided(pair, book)
            answers = []
            for prompt, params, case in crowd():
                [answer] = await pair.ask(prompt, params)
                assert answer.finish_reason is not None
                check(params, case, answer.token_ids, answer.finish_reason)
                answers.append(answer.sampled)
            await pair.check_all_is_back()
            return answers

    return asyncio.run(run())


def test_the_crowd_has_ends_of_both_kinds(alone: list[list[Sampled]]) -> None:
    guided_ends = [
        answer[-1].token_id == EOS
        for answer, (_, _, case) in zip(alone, crowd(), strict=True)
        if case is not None
    ]
    assert sum(guided_ends) > 20
    assert not all(guided_ends)


@overlapping
@pytest.mark.parametrize("num_slots", [0, 16, 600], ids=["return", "both", "swap"])
async def test_an_answer_is_the_same_whatever_happens_to_it(
    model: Model, book: GuideBook, alone: list[list[Sampled]], overlap: bool, num_slots: int
) -> None:
    requests = crowd()
    rows = sum(len(prompt) + params.max_tokens for prompt, params, _ in requests)
    async with running_engines(
        model,
        num_blocks=rows // BLOCK_SIZE // 9,
        num_slots=num_slots,
        overlap=overlap,
        prior_tokens=2,
        risk=0.9,
        prefix_cache=True,
    ) as pair:
        guided(pair, book).parks = random.Random(3)
        answers = await asyncio.gather(
            *(
                pair.ask(prompt, params, local=number % 4 == 1)
                for number, (prompt, params, _) in enumerate(requests)
            )
        )
        await pair.check_all_is_back()
        assert pair.num_parked > 10
        assert pair.decode.stats().num_preemptions > 5
        for [answer], right in zip(answers, alone, strict=True):
            assert answer.token_ids == [token.token_id for token in right]


@overlapping
async def test_several_answers_have_each_their_own_place_in_the_guide(
    model: Model, book: GuideBook, overlap: bool
) -> None:
    async with running_engines(model, overlap=overlap) as pair:
        guided(pair, book)
        for case in CASES:
            params = replace(SAMPLED, max_tokens=60, seed=5, temperature=15.0, guide=case.guide)
            together = await pair.ask([1, 2, 3], params, 6)
            for number, answer in enumerate(together):
                assert answer.finish_reason is not None
                check(params, case, answer.token_ids, answer.finish_reason)
                [by_itself] = await pair.ask([1, 2, 3], params.for_answer(number))
                assert answer.token_ids == by_itself.token_ids
            assert len({tuple(answer.token_ids) for answer in together}) > 1
        await pair.check_all_is_back()


@overlapping
async def test_a_step_with_a_guide_still_starts_before_the_last_is_read(
    model: Model, book: GuideBook, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the choice waits for the last tokens: the model does not."""
    async with running_engines(model, overlap=overlap) as pair:
        guided(pair, book)
        log: list[str] = []

        def noting(what: str, call: Callable[..., object]) -> Callable[..., object]:
            def noted(*arguments: object) -> object:
                log.append(what)
                return call(*arguments)

            return noted

        engine = pair.decode
        monkeypatch.setattr(engine._runner, "forward", noting("run", engine._runner.forward))
        monkeypatch.setattr(engine, "_sample", noting("choose", engine._sample))
        monkeypatch.setattr(engine, "_append", noting("read", engine._append))
        digits = next(case for case in CASES if case.name == "digits")
        params = replace(SamplingParams.greedy_for(20), guide=digits.guide)
        [answer] = await pair.ask([4, 5], params)
        assert len(answer.token_ids) == 9  # eight characters and the end
        await pair.check_all_is_back()
    first = ["run", "choose", "run", "read", "choose", "run", "read", "choose"]
    apart = ["run", "choose", "read"] * 3
    assert log[:8] == (first if overlap else apart[:8])
