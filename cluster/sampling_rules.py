"""The ranges and defaults of SamplingParams: an incomplete message becomes a complete one."""

from __future__ import annotations

import math
import secrets
import struct
from typing import TYPE_CHECKING

from legato.cluster.errors import invalid
from legato.protos import common_pb2
from legato.text.guide import Guide

if TYPE_CHECKING:
    from collections.abc import Iterable

    from legato.cluster.errors import RequestError

DEFAULT_MAX_TOKENS = 256
MAX_TEMPERATURE = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
# Together they stay well below 4 MiB, which clients take of one message as they come.
MAX_PROMPT_LOGPROBS = 1 << 18

# name, default, lowest, highest, whether the lowest itself is allowed; see common.proto.
_NUMBERS: tuple[tuple[str, float, float, float, bool], ...] = (
    ("temperature", 1.0, 0.0, MAX_TEMPERATURE, True),
    ("top_p", 1.0, 0.0, 1.0, False),
    ("min_p", 0.0, 0.0, 1.0, True),
    ("repetition_penalty", 1.0, 0.0, 100.0, False),
    ("presence_penalty", 0.0, -2.0, 2.0, True),
    ("frequency_penalty", 0.0, -2.0, 2.0, True),
)


def shown_float(value: float) -> str:
    """The shortest text that reads back as this fp32: 1.0000001 must not be shown as 1."""
    for digits in range(6, 9):
        text = f"{value:.{digits}g}"
        if struct.pack("f", float(text)) == struct.pack("f", value):
            return text
    return f"{value:.9g}"


def check_sampling(asked: common_pb2.SamplingParams, vocab_size: int) -> None:
    """Checks every field that needs no prompt; costs no more than the message is long.

    Raises:
        RequestError: INVALID_ARGUMENT naming field, value and limit.
    """
    for name, _, low, high, low_allowed in _NUMBERS:
        value = getattr(asked, name)
        # Written so that NaN, for which every comparison is false, fails.
        within = (low <= value if low_allowed else low < value) and value <= high
        if asked.HasField(name) and not within:  # type: ignore[arg-type]  # the stub wants literals
            bracket = "[" if low_allowed else "("
            raise invalid(
                f"sampling.{name} is {shown_float(value)}, limit {bracket}{low:g}, {high:g}]"
            )
    if asked.top_k < 0:
        raise invalid(f"sampling.top_k is {asked.top_k}, limit [0, {2**31 - 1}] (0 is off)")
    if asked.seed < 0:
        raise invalid(f"sampling.seed is {asked.seed}, limit [0, {2**63 - 1}]")
    least = 0 if asked.HasField("prompt_logprobs") else 1
    if asked.HasField("max_tokens") and asked.max_tokens < least:
        limit = f"[{least}, {2**31 - 1}]{', or 0 with prompt_logprobs' if least else ''}"
        raise invalid(f"sampling.max_tokens is {asked.max_tokens}, limit {limit}")
    max_tokens = asked.max_tokens if asked.HasField("max_tokens") else DEFAULT_MAX_TOKENS
    if not 0 <= asked.min_tokens <= max_tokens:
        raise invalid(
            f"sampling.min_tokens is {asked.min_tokens}, limit [0, {max_tokens}] (max_tokens)"
        )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(asked, name)  # 0 where it is not set
        if not 0 <= count <= MAX_LOGPROBS:
            raise invalid(f"sampling.{name} is {count}, limit [0, {MAX_LOGPROBS}]")
    _check_stop(asked)
    read_guide(asked)
    _check_count("sampling.stop_token_ids", len(asked.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_token_ids("sampling.stop_token_ids", asked.stop_token_ids, vocab_size)
    _check_count("sampling.logit_bias", len(asked.logit_bias), MAX_LOGIT_BIAS)
    for token_id, bias in asked.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise invalid(
                f"sampling.logit_bias[{token_id}] has token id {token_id}, limit "
                f"[0, {vocab_size - 1}] (vocabulary of {vocab_size})"
            )
        if not -100.0 <= bias <= 100.0:
            raise invalid(
                f"sampling.logit_bias[{token_id}] is {shown_float(bias)}, limit [-100, 100]"
            )


def read_guide(asked: common_pb2.SamplingParams) -> Guide | None:
    """The guide, where there is one; whether it compiles is another matter.

    Raises:
        RequestError: INVALID_ARGUMENT naming field, value and limit.
    """
    if not asked.HasField("guide"):
        return None
    try:
        return Guide.read(asked.guide)
    except ValueError as error:
        raise invalid(str(error)) from None


def complete_sampling(
    asked: common_pb2.SamplingParams, max_tokens: int
) -> common_pb2.SamplingParams:
    """Fills every default. `max_tokens` is what the model and the pools allow of what was asked.

    `min_tokens` is lowered to it: a shorter context must not make a valid request wrong.
    `prompt_logprobs` is left out: a request asks for them once, and not in each of its attempts.
    """
    complete = common_pb2.SamplingParams()
    complete.CopyFrom(asked)
    complete.ClearField("prompt_logprobs")
    for name, default, *_ in _NUMBERS:
        if not asked.HasField(name):  # type: ignore[arg-type]  # the stub wants literals
            setattr(complete, name, default)
    complete.temperature = math.fabs(complete.temperature)  # -0.0 is 0
    complete.top_k = asked.top_k
    complete.seed = asked.seed if asked.HasField("seed") else secrets.randbits(63)
    complete.ignore_eos = asked.ignore_eos
    complete.max_tokens = max_tokens
    complete.min_tokens = min(asked.min_tokens, max_tokens)
    return complete


def check_prompt_logprobs(asked: common_pb2.SamplingParams, num_prompt: int) -> None:
    """Refuses more than one message can hold.

    Raises:
        RequestError: INVALID_ARGUMENT naming field, value and limit.
    """
    numbers = num_prompt * (asked.prompt_logprobs + 1)
    if asked.HasField("prompt_logprobs") and numbers > MAX_PROMPT_LOGPROBS:
        raise invalid(
            f"sampling.prompt_logprobs is {asked.prompt_logprobs}, which makes {numbers} numbers "
            f"for a prompt of {num_prompt} tokens, limit {MAX_PROMPT_LOGPROBS}"
        )


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuses the first id outside the model's vocabulary.

    The model's vocabulary counts, not the tokenizer's: ids that only the embedding knows are
    accepted, as they are in what models themselves may emit.
    """
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise _outside(field, index, token_id, vocab_size)


def _outside(field: str, index: int, token_id: int, vocab_size: int) -> RequestError:
    return invalid(
        f"{field}[{index}] is {token_id}, limit [0, {vocab_size - 1}] (vocabulary of {vocab_size})"
    )


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise invalid(f"{field} has {count} entries, limit {limit}")


def _check_stop(asked: common_pb2.SamplingParams) -> None:
    _check_count("sampling.stop", len(asked.stop), MAX_STOP_STRINGS)
    for index, stop in enumerate(asked.stop):
        if not stop:
            raise invalid(f"sampling.stop[{index}] is empty, limit [1, {MAX_STOP_CHARS}] chars")
        if len(stop) > MAX_STOP_CHARS:
            raise invalid(
                f"sampling.stop[{index}] has {len(stop)} chars, limit [1, {MAX_STOP_CHARS}]"
            )
