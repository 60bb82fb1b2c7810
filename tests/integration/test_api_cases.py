"""Every field of GenerateRequest, case by case: a pair, one worker alone and transformers agree."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import pytest_asyncio
import torch
from api_cases import OTHER_EOS, SCRIPT, Outcome, Place, ask, request
from local_service import LocalService
from oracle import greedy, load_oracle
from script_model import CONTEXT, write_script_folder
from tiny_gguf import write_gguf
from tiny_models import (
    CHAT_TEMPLATE,
    EOS,
    IM_END,
    IM_START,
    VOCAB_SIZE,
    make_llama,
    make_model_folder,
)
from transformers import AutoTokenizer

from legato.protos import common_pb2, generation_pb2
from legato.protos.status_details import read_details

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
RULES = (
    "{% for m in messages %}{% if loop.index0 % 2 == 1 and m['role'] != 'assistant' %}"
    "{{ raise_exception('users and assistants must take turns') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}: {{ m['content'] | trim }}<|im_end|>{% endfor %}<|im_start|>"
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def places(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Place]]:
    root = tmp_path_factory.mktemp("models")
    places = {
        "random": Place(make_model_folder(root / "random", "llama")),
        "script": Place(
            write_script_folder(
                root / "script", SCRIPT, eos_token_ids=[OTHER_EOS, EOS], chat_template=RULES
            )
        ),
    }
    services = [s for place in places.values() for s in (place.pair, place.alone)]
    started = await asyncio.gather(*(s.__aenter__() for s in services), return_exceptions=True)
    try:
        for result in started:
            if isinstance(result, BaseException):
                raise result
        yield places
        for service in services:
            await service.wait_idle()
    finally:
        for result in started:
            if isinstance(result, LocalService):
                await result.__aexit__(None, None, None)


@pytest.fixture(scope="module")
def oracle(places: dict[str, Place]) -> PreTrainedModel:
    return load_oracle(places["random"].folder)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def canary(places: dict[str, Place], oracle: PreTrainedModel) -> AsyncIterator[None]:
    """After every case nothing is held and a known answer still comes."""
    yield
    message = request("random", list(b"canary"), max_tokens=8, ignore_eos=True)
    outcome = await places["random"].ask(message)
    assert outcome.answers[0].token_ids == greedy(oracle, list(b"canary"), 8)
    for place in places.values():
        await place.pair.wait_idle(5)


# --- what the script says ---------------------------------------------------------------------

PART_PROMPTS_STOP = SCRIPT.prompt("stop", b"STOP")
PART_PROMPTS_ST = SCRIPT.prompt("stop", b"xS")
# What is asked of the script; text, tokens, reason and stop_reason of the answer.
SAID: dict[str, tuple[dict[str, Any], str, int, int, str]] = {
    "B01 one token of one asked": ({"prompt": "stop", "max_tokens": 1}, "a", 1, LENGTH, ""),
    "B01 two of two": ({"prompt": "stop", "max_tokens": 2}, "ab", 2, LENGTH, ""),
    "B01 three of three": ({"prompt": "stop", "max_tokens": 3}, "abS", 3, LENGTH, ""),
    "B10 a stop string over four tokens": (
        {"prompt": "stop", "stop": ["STOP"]}, "ab", 6, STOP, "STOP"),
    "B10 it begins within": ({"prompt": "stop", "stop": ["TOPc"]}, "abS", 7, STOP, "TOPc"),
    "B10 what was held back is flushed": (
        {"prompt": "stop", "stop": ["STOPX"], "max_tokens": 6}, "abSTOP", 6, LENGTH, ""),
    "B10 what was held back goes on": (
        {"prompt": "stop", "stop": ["STOPX"], "max_tokens": 8}, "abSTOPcd", 8, LENGTH, ""),
    "B10 the first of two to be complete": (
        {"prompt": "stop", "stop": ["STOP", "ST"]}, "ab", 4, STOP, "ST"),
    "B10 two that end together: the longer": (
        {"prompt": "stop", "stop": ["OP", "TOP"]}, "abS", 6, STOP, "TOP"),
    "B10 it is the whole answer": (
        {"prompt": "stop", "stop": ["ab"]}, "", 2, STOP, "ab"),
    "B10 it is the last token": (
        {"prompt": "end", "stop": ["ST"], "max_tokens": 4}, "xy", 4, STOP, "ST"),
    "B10 the prompt ends with it": (
        {"prompt": PART_PROMPTS_STOP, "stop": ["STOP"]}, "ab", 6, STOP, "STOP"),
    "B10 over the border of prompt and answer": (
        {"prompt": PART_PROMPTS_ST, "stop": ["Sab"], "max_tokens": 3}, "abS", 3, LENGTH, ""),
    "B10 sixteen of them": (
        {"prompt": "stop", "stop": [*(f"{i}!" for i in range(15)), "TO"]}, "abS", 5, STOP, "TO"),
    "B10 one of 1,024 characters": (
        {"prompt": "stop", "stop": ["a" * 1024], "max_tokens": 3}, "abS", 3, LENGTH, ""),
    "B10 a character of four tokens": (
        {"prompt": "text", "stop": ["😀"]}, " a  b ", 10, STOP, "😀"),
    "B10 before min_tokens it does not count": (
        {"prompt": "stop", "stop": ["b"], "min_tokens": 3, "max_tokens": 4}, "abST", 4, LENGTH, ""),
    "B10 at min_tokens it counts": (
        {"prompt": "stop", "stop": ["STOP"], "min_tokens": 6}, "ab", 6, STOP, "STOP"),
    "B48 an EOS of generation_config.json": ({"prompt": "eos"}, "ab", 3, STOP, "<|im_end|>"),
    "B48 ignore_eos: neither of the two": (
        {"prompt": "eos", "ignore_eos": True, "max_tokens": 8}, "abcdef", 8, LENGTH, ""),
    "B48 ignore_eos, and one of them as a stop token": (
        {"prompt": "eos", "ignore_eos": True, "stop_token_ids": [EOS]}, "abcd", 6, STOP, "</s>"),
    "B48 a stop token that is a letter": (
        {"prompt": "stop", "stop_token_ids": [ord("T")]}, "abST", 4, STOP, "T"),
    "B48 a stop token before an EOS": (
        {"prompt": "eos", "stop_token_ids": [ord("b")]}, "ab", 2, STOP, "b"),
    "B48 the first token is a stop token": (
        {"prompt": "eos", "stop_token_ids": [ord("a")]}, "a", 1, STOP, "a"),
    "B48 min_tokens with ignore_eos and a stop token": (
        {"prompt": "eos", "ignore_eos": True, "stop_token_ids": [OTHER_EOS], "min_tokens": 2,
         "max_tokens": 3}, "ab", 3, STOP, "<|im_end|>"),
    "B22 one token of room": (
        {"prompt": [63] * (CONTEXT - 1)}, ".", 1, LENGTH, ""),
    "B22 max_tokens of the whole context is what is left": (
        {"prompt": [63] * (CONTEXT - 5), "max_tokens": CONTEXT}, ".....", 5, LENGTH, ""),
    "B22 max_tokens 2^31 - 1 too": (
        {"prompt": [63] * (CONTEXT - 5), "max_tokens": INT32_MAX}, ".....", 5, LENGTH, ""),
    "B22 unset it is what the context leaves": (
        {"prompt": [63] * (CONTEXT - 9)}, "." * 9, 9, LENGTH, ""),
    "text: spaces, emoji and tabs at the borders of tokens": (
        {"prompt": "text", "max_tokens": 16}, " a  b 😀é\n\tç", 16, LENGTH, ""),
    "text: it ends within an emoji": (
        {"prompt": "text", "max_tokens": 8}, " a  b \ufffd", 8, LENGTH, ""),
    "bias: the script can be overruled": (
        {"prompt": "stop", "max_tokens": 2, "logit_bias": {ord("z"): 100.0}}, "zz", 2, LENGTH, ""),
    "bias: and a token be ruled out": (
        {"prompt": "eos", "max_tokens": 4, "logit_bias": {OTHER_EOS: -100.0, ord("!"): 1.0}},
        "ab!c", 4, LENGTH, ""),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "text", "tokens", "reason", "why"), SAID.values(), ids=SAID)
async def test_the_script_is_said(
    places: dict[str, Place], fields: dict[str, Any], text: str, tokens: int, reason: int, why: str
) -> None:
    [answer] = (await places["script"].ask(request("script", **fields))).answers
    assert (answer.text, len(answer.token_ids)) == (text, tokens)
    assert (answer.finish.finish_reason, answer.finish.stop_reason) == (reason, why)
    for end in range(len(answer.deltas)):
        assert text.startswith("".join(answer.deltas[:end])), "a character that is not in the text"


async def test_b48_no_eos_before_min_tokens(places: dict[str, Place]) -> None:
    """Where the script says EOS, it may not be drawn; what follows is the position's affair."""
    [answer] = (await places["script"].ask(request("script", "eos", min_tokens=5))).answers
    script = [*b"ab", OTHER_EOS, *b"cd", EOS]
    assert answer.token_ids[2] not in (EOS, OTHER_EOS)
    assert answer.token_ids[:2] + answer.token_ids[3:] == script[:2] + script[3:]
    assert (answer.finish.finish_reason, answer.finish.stop_reason) == (STOP, "</s>")


# --- what a random model says, as transformers has it -----------------------------------------

PROMPT = list(b"The quick brown fox jumps over")
GREEDY: dict[str, dict[str, Any]] = {
    "B03 temperature 0": {},
    "B03 top_k 0 is off": {"top_k": 0},
    "B21 temperature -0.0": {"temperature": -0.0},
    "B21 temperature 1e-40 is greedy": {"temperature": 1e-40},
    "B21 temperature 9e-6 is greedy": {"temperature": 9e-6, "seed": 1},
    "B21 top_k 1 at a high temperature": {"temperature": 2.0, "top_k": 1},
    "B21 min_p 1 leaves the most likely": {"temperature": 1.5, "min_p": 1.0},
    "B21 a tiny top_p leaves the most likely": {"temperature": 1.5, "top_p": 1e-6},
    "B19 the last id of the vocabulary": {"prompt": [1, VOCAB_SIZE - 1, 2]},
    "B19 an end id that the tokenizer does not know": {"stop_token_ids": [VOCAB_SIZE - 1]},
    "bias: 0 changes nothing": {"logit_bias": {3: 0.0}},
    "penalties that are off": {"repetition_penalty": 1.0, "presence_penalty": 0.0},
    "repetition_penalty 1.5": {"repetition_penalty": 1.5},
    "repetition_penalty 0.5": {"repetition_penalty": 0.5},
    "priority batch": {"priority": common_pb2.PRIORITY_BATCH},
    "a cache salt": {"cache_salt": "tenant 7"},
    "B01 one token": {"max_tokens": 1},
    "B50 logprobs 0": {"logprobs": 0},
    "B50 logprobs 1": {"logprobs": 1},
    "B50 logprobs 5": {"logprobs": 5},
    "B50 logprobs 20": {"logprobs": 20},
    "B50 logprobs of one token, the hand-off's": {"logprobs": 3, "max_tokens": 1},
    "B50 logprobs at a temperature": {"logprobs": 4, "temperature": 2.0, "seed": 5},
    "B50 logprobs with a token ruled out": {"logprobs": 2, "logit_bias": {65: -100.0}},
    "B50 logprobs with penalties": {"logprobs": 2, "frequency_penalty": 2.0},
    "B50 logprobs of several answers": {"logprobs": 2, "temperature": 1.0, "seed": 3, "n": 3},
    "B50 prompt logprobs 0": {"prompt_logprobs": 0},
    "B50 prompt logprobs 5": {"prompt_logprobs": 5, "logprobs": 1},
    "B50 prompt logprobs 20": {"prompt_logprobs": 20},
    "B50 prompt logprobs and no token": {"prompt_logprobs": 1, "max_tokens": 0},
    "B50 prompt logprobs of a prompt of one token": {"prompt_logprobs": 2, "prompt": [7]},
    "B50 prompt logprobs of two": {"prompt_logprobs": 2, "prompt": [7, 8]},
    "B50 prompt logprobs over many blocks": {"prompt_logprobs": 2, "prompt": PROMPT * 15},
    "B50 prompt logprobs of several answers": {"prompt_logprobs": 1, "n": 2, "seed": 1},
    "B50 prompt logprobs of a text": {"prompt_logprobs": 1, "prompt": "¿Dónde está 😀?"},
}


def check_logprobs(
    logits: torch.Tensor,
    token_ids: Sequence[int],
    entries: Sequence[common_pb2.TokenLogprobs],
    count: int,
) -> None:
    """Each entry is of the token that follows on a row of logits."""
    assert len(entries) == len(token_ids) == logits.shape[0]
    for row, token_id, entry in zip(logits.log_softmax(-1), token_ids, entries, strict=True):
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert len(entry.top) == count
        values = [top.logprob for top in entry.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
        for top in entry.top:
            assert top.logprob == pytest.approx(row[top.token_id].item(), abs=1e-4)


@torch.inference_mode()
def check_with_transformers(
    oracle: PreTrainedModel, message: generation_pb2.GenerateRequest, outcome: Outcome
) -> None:
    sampling = message.sampling
    prompt = list(message.token_ids.ids) or list(message.text.encode())
    for answer in outcome.answers:
        whole = torch.tensor([[*prompt, *answer.token_ids]])
        logits = oracle(whole).logits[0]
        count = sampling.logprobs
        rows = logits[len(prompt) - 1 : -1]
        if sampling.HasField("logprobs"):
            check_logprobs(rows, answer.token_ids, answer.logprobs, count)
        else:
            assert answer.logprobs == []
    if sampling.HasField("prompt_logprobs"):
        first, *others = outcome.prompt_logprobs
        assert not first.HasField("logprob")
        rows = logits[: len(prompt) - 1]
        check_logprobs(rows, prompt[1:], others, sampling.prompt_logprobs)
    else:
        assert outcome.prompt_logprobs == []


@pytest.mark.parametrize("fields", GREEDY.values(), ids=GREEDY)
async def test_a_random_model_is_transformers_own(
    places: dict[str, Place], oracle: PreTrainedModel, fields: dict[str, Any]
) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 16, "ignore_eos": True, **fields}
    message = request("random", **fields)
    outcome = await places["random"].ask(message)
    assert outcome.code is grpc.StatusCode.OK, outcome.message
    check_with_transformers(oracle, message, outcome)
    only_top = fields.get("top_k") == 1 or "min_p" in fields or fields.get("top_p") == 1e-6
    changed = "logit_bias" in fields or "frequency_penalty" in fields
    if changed or (message.sampling.temperature >= 1e-5 and not only_top):
        return
    prompt = list(message.token_ids.ids) or list(message.text.encode())
    expected: list[int] = []
    if fields["max_tokens"]:
        expected = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=fields["max_tokens"],
            min_new_tokens=fields["max_tokens"],
            repetition_penalty=fields.get("repetition_penalty", 1.0),
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
    for answer in outcome.answers:
        assert answer.token_ids == expected
        assert answer.finish.finish_reason == LENGTH


# Both ways of serving agree (`Place.ask`), though transformers draws other random numbers.
DRAWN: dict[str, dict[str, Any]] = {
    "B24 the smallest seed": {"seed": 0},
    "B24 the largest seed": {"seed": INT64_MAX},
    "B24 four answers of the largest seed": {"seed": INT64_MAX, "n": 4},
    "B21 temperature 100": {"temperature": 100.0},
    "B21 top_p 1": {"top_p": 1.0},
    "B21 top_p below 1": {"top_p": 0.7},
    "B21 top_k of the vocabulary": {"top_k": VOCAB_SIZE},
    "B21 top_k beyond it": {"top_k": INT32_MAX},
    "B21 top_k 3": {"top_k": 3},
    "B21 min_p 0.1": {"min_p": 0.1},
    "penalties at their ends": {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    "penalties at their other ends": {"presence_penalty": -2.0, "frequency_penalty": -2.0},
    "repetition_penalty 100": {"repetition_penalty": 100.0},
    "bias: a thousand entries": {"logit_bias": {i: (i % 7) - 3.0 for i in range(VOCAB_SIZE)}},
    "all at once": {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.2,
                    "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {65: 5.0},
                    "min_tokens": 4, "logprobs": 2, "prompt_logprobs": 2, "n": 2},
}  # fmt: skip


@pytest.mark.parametrize("fields", DRAWN.values(), ids=DRAWN)
async def test_draws_are_the_same_in_a_pair_and_alone(
    places: dict[str, Place], fields: dict[str, Any]
) -> None:
    settings = {"temperature": 1.0, "seed": 7, "max_tokens": 24, "ignore_eos": True, **fields}
    message = request("random", "once upon a time", **settings)
    outcome = await places["random"].ask(message)
    again = await places["random"].ask(message)
    assert outcome.comparable() == again.comparable()
    assert outcome.code is grpc.StatusCode.OK, outcome.message
    assert all(len(answer.token_ids) == 24 for answer in outcome.answers)
    seeds = [answer.finish.usage.seed for answer in outcome.answers]
    assert seeds == [(settings["seed"] + i) % 2**63 for i in range(len(seeds))]
    assert len({tuple(answer.token_ids) for answer in outcome.answers}) == len(seeds)


async def test_b24_of_several_answers_each_is_one_of_its_own(places: dict[str, Place]) -> None:
    settings = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    place = places["random"]
    together = await place.ask(request("random", "together", n=3, seed=5, **settings))
    for index, answer in enumerate(together.answers):
        single = await place.ask(request("random", "together", seed=5 + index, **settings))
        assert single.answers[0].token_ids == answer.token_ids


async def test_b24_without_a_seed_answers_differ_and_tell_theirs(places: dict[str, Place]) -> None:
    message = request("random", "unseeded", temperature=1.0, max_tokens=16, ignore_eos=True)
    outcomes = [await ask(places["random"].pair, message) for _ in range(2)]
    first, second = (outcome.answers[0] for outcome in outcomes)
    assert first.token_ids != second.token_ids
    message.sampling.seed = first.finish.usage.seed
    assert (await places["random"].ask(message)).answers[0].token_ids == first.token_ids


# --- what is refused --------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "B03 top_p 0": ({"top_p": 0.0}, "sampling.top_p"),
    "B03 max_tokens 0 alone": ({"max_tokens": 0}, "sampling.max_tokens"),
    "B19 a prompt id below 0": ({"prompt": [1, -1]}, "token_ids[1]"),
    "B19 a prompt id of the vocabulary's size": ({"prompt": [VOCAB_SIZE]}, "token_ids[0]"),
    "B19 a prompt id of 2^31 - 1": ({"prompt": [INT32_MAX]}, "token_ids[0]"),
    "B19 a stop id outside": ({"stop_token_ids": [3, VOCAB_SIZE]}, "sampling.stop_token_ids[1]"),
    "B19 a stop id below 0": ({"stop_token_ids": [-1]}, "sampling.stop_token_ids[0]"),
    "B19 a biased id outside": (
        {"logit_bias": {VOCAB_SIZE: 1.0}},
        f"sampling.logit_bias[{VOCAB_SIZE}]",
    ),
    "B21 temperature NaN": ({"temperature": math.nan}, "sampling.temperature"),
    "B21 temperature inf": ({"temperature": math.inf}, "sampling.temperature"),
    "B21 temperature above 100": ({"temperature": 100.1}, "sampling.temperature"),
    "B21 top_p NaN": ({"top_p": math.nan}, "sampling.top_p"),
    "B21 top_p a little above 1": ({"top_p": 1.0000002}, "sampling.top_p"),
    "B21 top_k -1": ({"top_k": -1}, "sampling.top_k"),
    "B21 min_p NaN": ({"min_p": math.nan}, "sampling.min_p"),
    "B21 repetition_penalty 0": ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
    "B21 presence_penalty -3": ({"presence_penalty": -3.0}, "sampling.presence_penalty"),
    "B21 frequency_penalty NaN": ({"frequency_penalty": math.nan}, "sampling.frequency_penalty"),
    "B22 the whole context": ({"prompt": [5] * 512}, "prompt"),
    "B24 seed -1": ({"seed": -1}, "sampling.seed"),
    "B48 min_tokens above max_tokens": ({"min_tokens": 5, "max_tokens": 4}, "sampling.min_tokens"),
    "B48 min_tokens -1": ({"min_tokens": -1}, "sampling.min_tokens"),
    "B50 logprobs 21": ({"logprobs": 21}, "sampling.logprobs"),
    "B50 logprobs -1": ({"logprobs": -1}, "sampling.logprobs"),
    "B50 prompt logprobs 21": ({"prompt_logprobs": 21}, "sampling.prompt_logprobs"),
    "bias NaN": ({"logit_bias": {5: math.nan}}, "sampling.logit_bias[5]"),
    "bias 101": ({"logit_bias": {5: 101.0}}, "sampling.logit_bias[5]"),
    "B10 an empty stop string": ({"stop": ["a", ""]}, "sampling.stop[1]"),
    "B10 seventeen stop strings": ({"stop": ["x"] * 17}, "sampling.stop"),
    "B10 a stop string too long": ({"stop": ["x" * 1025]}, "sampling.stop[0]"),
    "B18 a request_id with a newline": ({"request_id": "a\nb"}, "request_id"),
    "B18 a request_id too long": ({"request_id": "x" * 129}, "request_id"),
    "a cache salt that is no ASCII": ({"cache_salt": "é"}, "cache_salt"),
    "a priority that there is not": ({"priority": 7}, "priority"),
    "n 0": ({"n": 0}, "n"),
    "n 129": ({"n": 129}, "n"),
    "B49 a role that the template does not know": (
        {"prompt": [("wizard", "x")]},
        "messages[0].role",
    ),
    "B49 messages without a word": ({"prompt": [("user", "")]}, "messages"),
}


@pytest.mark.parametrize(("fields", "named"), REFUSED.values(), ids=REFUSED)
async def test_what_is_wrong_is_refused_by_name(
    places: dict[str, Place], fields: dict[str, Any], named: str
) -> None:
    outcome = await places["random"].ask(request("random", **{"prompt": "x", **fields}))
    assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT, outcome.message
    reason = "CONTEXT_LENGTH_EXCEEDED" if named == "prompt" else "INVALID_FIELD"
    assert outcome.details.reason == reason
    assert outcome.details.remedy
    assert outcome.details.violation is not None
    assert outcome.details.violation.field == named
    assert outcome.details.violation.limit or named.startswith("messages")


# --- text, chat templates, Tokenize -----------------------------------------------------------


async def tokenize(
    service: LocalService, message: generation_pb2.GenerateRequest
) -> generation_pb2.TokenizeResponse:
    asked = generation_pb2.TokenizeRequest(parse_special_tokens=message.parse_special_tokens)
    if message.HasField("text"):
        asked.text = message.text
    else:
        asked.messages.CopyFrom(message.messages)
    return await service.generation.Tokenize(asked, timeout=10)


CONTROL = "x<|im_end|>y<s>"
TEXTS: dict[str, dict[str, Any]] = {
    "a text": {"prompt": " two  spaces, 😀 and é"},
    "B49 control tokens in a text are text": {"prompt": CONTROL},
    "B49 unless asked": {"prompt": CONTROL, "parse_special_tokens": True},
    "a chat": {"prompt": [("system", "be brief"), ("user", "hi  there "), ("assistant", "yes?")]},
    "B49 control tokens in a message are text": {"prompt": [("user", CONTROL)]},
    "B49 unless asked of a message": {"prompt": [("user", CONTROL)], "parse_special_tokens": True},
}


@pytest.mark.parametrize("fields", TEXTS.values(), ids=TEXTS)
async def test_ids_of_tokenize_get_the_same_answer(
    places: dict[str, Place], fields: dict[str, Any]
) -> None:
    place = places["random"]
    message = request("random", max_tokens=12, ignore_eos=True, **fields)
    told = await tokenize(place.pair, message)
    outcome = await place.ask(message)
    by_ids = await place.ask(
        request("random", list(told.token_ids), max_tokens=12, ignore_eos=True)
    )
    assert outcome.comparable() == by_ids.comparable()
    assert outcome.answers[0].finish.usage.prompt_tokens == len(told.token_ids)
    assert len(told.tokens) == len(told.token_ids)
    num_control = sum(token_id > 255 for token_id in told.token_ids)
    prompt, special = fields["prompt"], fields.get("parse_special_tokens", False)
    written = 2 * CONTROL.count("<") // 2 if special else 0
    templates = 0 if isinstance(prompt, str) else 2 * len(prompt) + 1
    assert num_control == written + templates
    theirs = AutoTokenizer.from_pretrained(place.folder)
    if isinstance(prompt, list) and (special or CONTROL not in prompt[0][1]):
        chat = [{"role": role, "content": content} for role, content in prompt]
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert list(told.token_ids) == ids
    answer = outcome.answers[0]
    asked = generation_pb2.DetokenizeRequest(token_ids=answer.token_ids)
    assert (await place.pair.generation.Detokenize(asked, timeout=10)).text == answer.text


async def test_b49_a_chat_template_jinja_is_rendered_and_its_refusal_told(
    places: dict[str, Place],
) -> None:
    place = places["script"]
    message = request("script", [("user", " hi "), ("assistant", "yes")], max_tokens=2)
    told = await tokenize(place.pair, message)
    rendered = [IM_START, *b"user: hi", IM_END, IM_START, *b"assistant: yes", IM_END, IM_START]
    assert list(told.token_ids) == rendered
    outcome = await place.ask(message)
    [answer] = outcome.answers
    end = len(rendered) - 1
    assert answer.token_ids == SCRIPT.token_ids[end : end + 2]
    refused = await place.ask(request("script", [("user", "a"), ("user", "b")]))
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "users and assistants must take turns" in refused.message
    assert refused.details.violation is not None
    assert refused.details.violation.field == "messages"


@pytest.mark.parametrize(
    ("method", "message", "code", "reason"),
    [
        ("Tokenize", generation_pb2.TokenizeRequest(), "INVALID_ARGUMENT", "INVALID_FIELD"),
        ("Tokenize", generation_pb2.TokenizeRequest(text=""), "INVALID_ARGUMENT", "INVALID_FIELD"),
        (
            "Detokenize",
            generation_pb2.DetokenizeRequest(token_ids=[5, VOCAB_SIZE]),
            "INVALID_ARGUMENT",
            "INVALID_FIELD",
        ),
        (
            "Detokenize",
            generation_pb2.DetokenizeRequest(token_ids=[-1]),
            "INVALID_ARGUMENT",
            "INVALID_FIELD",
        ),
        (
            "Detokenize",
            generation_pb2.DetokenizeRequest(token_ids=[1] * (2**18 + 1)),
            "INVALID_ARGUMENT",
            "INVALID_FIELD",
        ),
    ],
)
async def test_what_cannot_be_tokenised_is_refused_by_name(
    places: dict[str, Place],
    method: str,
    message: generation_pb2.TokenizeRequest,
    code: str,
    reason: str,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await getattr(places["random"].pair.generation, method)(message, timeout=10)
    assert error.value.code().name == code
    assert read_details(tuple(error.value.trailing_metadata() or ())).reason == reason


async def test_a_gguf_file_has_template_eos_and_scores(tmp_path: Path) -> None:
    model = make_llama()
    metadata = {"tokenizer.ggml.pre": "smollm"}
    place = Place(write_gguf(tmp_path / "tiny.gguf", model, metadata=metadata))
    chat = request("gguf", [("user", "hi")], max_tokens=12, ignore_eos=True, prompt_logprobs=2)
    async with place.pair, place.alone:
        told = await tokenize(place.pair, chat)
        outcome = await place.ask(chat)
        alike = await place.ask(
            request("gguf", told.token_ids, max_tokens=12, ignore_eos=True, prompt_logprobs=2)
        )
    ids = list(told.token_ids)
    assert ids.count(IM_START) == CHAT_TEMPLATE.count("<|im_start|>") == 2
    assert outcome.comparable() == alike.comparable()
    with_ids = request("gguf", ids, max_tokens=12, prompt_logprobs=2)
    check_with_transformers(model, with_ids, outcome)


# --- the prefix cache -------------------------------------------------------------------------


async def test_prompt_logprobs_and_the_prefix_cache_do_each_other_no_harm(
    places: dict[str, Place], oracle: PreTrainedModel
) -> None:
    prompt = [(i * 37 + 11) % 256 for i in range(100)]
    plain = request("random", prompt, max_tokens=8, ignore_eos=True)
    scored = request("random", prompt, max_tokens=8, ignore_eos=True, prompt_logprobs=3)
    outcomes = [await places["random"].ask(m) for m in (plain, scored, plain, scored)]
    assert len({str(outcome.comparable()) for outcome in outcomes}) == 1
    cached = [o.answers[0].finish.usage.cached_prompt_tokens for o in outcomes]
    assert cached == [0, 0, 96, 0]
    for outcome in (outcomes[1], outcomes[3]):
        check_with_transformers(oracle, scored, outcome)


async def test_scored_and_plain_prompts_in_one_crowd(
    places: dict[str, Place], oracle: PreTrainedModel
) -> None:
    """Packed with others, each is as alone; half of them are read while others decode."""
    messages = [
        request(
            "random",
            [(i * 31 + j * 7) % 256 for j in range(5 + 23 * i)],
            max_tokens=10,
            ignore_eos=True,
            **({"prompt_logprobs": i % 4} if i % 2 else {}),
        )
        for i in range(12)
    ]
    outcomes = await asyncio.gather(*(places["random"].ask(message) for message in messages))
    for message, outcome in zip(messages, outcomes, strict=True):
        check_with_transformers(oracle, message, outcome)
        prompt = list(message.token_ids.ids)
        assert outcome.answers[0].token_ids == greedy(oracle, prompt, 10)


async def test_there_are_enough_cases() -> None:
    assert len(SAID) + len(GREEDY) + len(DRAWN) + len(REFUSED) + len(TEXTS) >= 100
