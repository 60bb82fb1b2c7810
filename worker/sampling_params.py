"""SamplingParams: the complete settings by which one request's tokens are chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.protos import common_pb2
    from legato.text.guide import Guide

GREEDY_BELOW = 1e-5  # temperatures under this would overflow fp32 logits; they mean greedy


@dataclass(frozen=True)
class SamplingParams:
    """All defaults are filled (the router did); ranges are those in common.proto."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int  # 0: off
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    ignore_eos: bool
    min_tokens: int
    logprobs: int | None  # None: none; k: the token's own and the k best
    stop_token_ids: frozenset[int]
    logit_bias: Mapping[int, float]
    prompt_logprobs: int | None = None  # of each prompt token: as `logprobs`
    guide: Guide | None = None  # what the answer's text must be

    @property
    def greedy(self) -> bool:
        """True where the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def reads_output(self) -> bool:
        """True where the choice depends on which tokens were emitted before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def for_answer(self, answer: int) -> SamplingParams:
        """Those of one of several answers, from 0: what a request of its own with `seed` + `answer`
        would have.
        """
        return replace(self, seed=(self.seed + answer) % 2**63) if answer else self

    @classmethod
    def greedy_for(cls, max_tokens: int, *, ignore_eos: bool = False) -> SamplingParams:
        """The most likely token each time and nothing else set, for ``max_tokens`` tokens."""
        return cls(
            max_tokens=max_tokens,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            seed=0,
            ignore_eos=ignore_eos,
            min_tokens=0,
            logprobs=None,
            stop_token_ids=frozenset(),
            logit_bias={},
        )

    @classmethod
    def from_proto(cls, message: common_pb2.SamplingParams) -> SamplingParams:
        """Reads a complete message; raises ValueError naming a field that is not set, or what is
        wrong with the guide.
        """
        for name in (
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "ignore_eos",
            "min_tokens",
        ):
            if not message.HasField(name):
                raise ValueError(f"sampling.{name} is not set: the router fills every default")
        return cls(
            max_tokens=message.max_tokens,
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            seed=message.seed,
            ignore_eos=message.ignore_eos,
            min_tokens=message.min_tokens,
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            stop_token_ids=frozenset(message.stop_token_ids),
            logit_bias=dict(message.logit_bias),
            prompt_logprobs=(
                message.prompt_logprobs if message.HasField("prompt_logprobs") else None
            ),
            guide=read_guide(message),
        )


def read_guide(message: common_pb2.SamplingParams) -> Guide | None:
    """Raises ValueError naming field, value and limit."""
    if not message.HasField("guide"):
        return None
    from legato.text.guide import Guide  # llguidance, which most workers never need

    return Guide.read(message.guide)
