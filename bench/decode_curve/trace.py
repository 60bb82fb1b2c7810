"""Trace: the requests of a run of the decode curve, the same ones in every run."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from legato.bench.accuracy_text import TEXT
from legato.protos import generation_pb2
from legato.worker.sampling_params import SamplingParams

if TYPE_CHECKING:
    from legato.cluster.text.model_text import ModelText

# Short answers, middling ones, and such as only max_tokens ends.
_ASKED = (
    "In one word: which colour is the sky at noon?",
    "Name three fruits.",
    "Say hello in French.",
    "Is seven a prime number? Answer with yes or no.",
    "What is the capital of Italy?",
    "Explain in two sentences why the sea is salty.",
    "Give me a short recipe for pancakes.",
    "Write a story about a lighthouse and the man who keeps it.",
    "List ten things to take along on a long walk, each with a reason.",
)
_ASKED_OF_TEXT = (
    "Give this text a title.",
    "Name one thing that this text speaks of.",
    "Say in one sentence what this text is about.",
    "Summarise this text.",
)


@dataclass(frozen=True)
class Request:
    """One prompt and how it is to be answered."""

    number: int  # the order of arrival
    prompt: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int]

    @property
    def max_rows(self) -> int:
        """KV rows at its longest: the last token has none."""
        return len(self.prompt) + self.params.max_tokens - 1


def chats(text: ModelText, num_requests: int, max_tokens: int, seed: int) -> list[Request]:
    """Questions, some of them about a text of one or two paragraphs; sampled at temperature 1.

    Each has its own seed, and a token is drawn by seed and position alone: so the lengths of the
    answers, which end by themselves, are real and the same in every run.
    """
    draw = random.Random(seed)
    paragraphs = [p for p in TEXT.split("\n\n") if len(p) > 200]
    requests = []
    for number in range(num_requests):
        if draw.random() < 0.6:
            content = draw.choice(_ASKED)
        else:
            about = "\n\n".join(draw.sample(paragraphs, draw.choice((1, 1, 1, 2))))
            content = f"{draw.choice(_ASKED_OF_TEXT)}\n\n{about}"
        params = replace(
            SamplingParams.greedy_for(max_tokens), temperature=1.0, seed=draw.getrandbits(62)
        )
        requests.append(
            Request(number, _encode(text, content), params, frozenset(text.eos_token_ids))
        )
    return requests


def _encode(text: ModelText, content: str) -> list[int]:
    if not text.has_chat_template:
        return text.encode_text(content)
    return text.encode_chat([generation_pb2.ChatMessage(role="user", content=content)])


def alike(num_requests: int, prompt_tokens: int, max_tokens: int, vocab_size: int) -> list[Request]:
    """Greedy and to the last token; no two prompts begin alike."""
    params = SamplingParams.greedy_for(max_tokens, ignore_eos=True)
    return [
        Request(
            number,
            [(1 + 7919 * number + 31 * i) % vocab_size for i in range(prompt_tokens)],
            params,
            frozenset(),
        )
        for number in range(num_requests)
    ]
