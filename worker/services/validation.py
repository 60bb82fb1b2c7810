"""Checks of what comes in over the wire, so that nothing sick reaches the engine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from legato.protos import common_pb2
from legato.worker.handoff.tickets import AttemptKey
from legato.worker.priority import Priority
from legato.worker.sampling_params import SamplingParams
from legato.worker.services.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Iterable

    from legato.protos import worker_pb2

MAX_REQUEST_ID_BYTES = 256
MAX_CACHE_SALT_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_ANSWERS = 128
MAX_ADDRESS_CHARS = 300  # a name of 253, and a port
_PRIORITIES = {
    common_pb2.PRIORITY_UNSPECIFIED: Priority.INTERACTIVE,
    common_pb2.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
    common_pb2.PRIORITY_BATCH: Priority.BATCH,
}
# As common.proto states them: name, lowest, highest, whether the lowest itself is allowed.
_RANGES: tuple[tuple[str, float, float, bool], ...] = (
    ("temperature", 0.0, math.inf, True),
    ("top_p", 0.0, 1.0, False),
    ("top_k", 0, 2**31 - 1, True),
    ("min_p", 0.0, 1.0, True),
    ("repetition_penalty", 0.0, math.inf, False),
    ("presence_penalty", -2.0, 2.0, True),
    ("frequency_penalty", -2.0, 2.0, True),
    ("seed", 0, 2**63 - 1, True),
)


def read_key(key: worker_pb2.AttemptKey) -> AttemptKey:
    """Raises CallError where the key is missing or absurd."""
    size = len(key.request_id.encode())
    if not 1 <= size <= MAX_REQUEST_ID_BYTES:
        raise invalid(f"key.request_id has {size} bytes, limit [1, {MAX_REQUEST_ID_BYTES}]")
    if key.attempt < 0:
        raise invalid(f"key.attempt must not be negative, got {key.attempt}")
    return AttemptKey(key.request_id, key.attempt)


def check_address(field: str, address: str) -> None:
    """Raises CallError where it is empty or long: it is repeated in sentences and logs. What it is
    beyond that, connecting tells.
    """
    if not address:
        raise invalid(f"{field} is empty")
    if len(address) > MAX_ADDRESS_CHARS:
        raise invalid(f"{field} has {len(address)} characters, limit {MAX_ADDRESS_CHARS}")


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises CallError naming the first id outside the vocabulary."""
    ids = list(token_ids)
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise invalid(f"{field} holds token id {bad}, limit [0, {vocab_size})")


def read_sampling(message: common_pb2.SamplingParams, vocab_size: int) -> SamplingParams:
    """Raises CallError where a field is not set or out of its range."""
    try:
        params = SamplingParams.from_proto(message)
    except ValueError as error:
        raise invalid(str(error)) from None
    for name, low, high, low_allowed in _RANGES:
        value = getattr(params, name)
        # Written so that NaN, for which every comparison is false, fails; inf fails isfinite.
        if not ((low <= value if low_allowed else low < value) and value <= high) or (
            not math.isfinite(value)
        ):
            bracket = "[" if low_allowed else "("
            raise invalid(f"sampling.{name} is {value}, limit {bracket}{low}, {high}]")
    if params.max_tokens < 1:
        raise invalid(f"sampling.max_tokens must be at least 1, got {params.max_tokens}")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise invalid(
            f"sampling.min_tokens is {params.min_tokens}, limit [0, max_tokens {params.max_tokens}]"
        )
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise invalid(f"sampling.{name} is {count}, limit [0, {MAX_LOGPROBS}]")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(
            f"sampling.stop_token_ids has {len(params.stop_token_ids)} ids, "
            f"limit {MAX_STOP_TOKEN_IDS}"
        )
    check_token_ids("sampling.stop_token_ids", params.stop_token_ids, vocab_size)
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise invalid(
            f"sampling.logit_bias has {len(params.logit_bias)} entries, limit {MAX_LOGIT_BIAS}"
        )
    check_token_ids("sampling.logit_bias", params.logit_bias, vocab_size)
    for token_id, bias in params.logit_bias.items():
        if not -100.0 <= bias <= 100.0:
            raise invalid(f"sampling.logit_bias[{token_id}] is {bias}, limit [-100, 100]")
    return params


def check_lengths(
    num_tokens: int, num_prompt_tokens: int, max_tokens: int, context_length: int
) -> None:
    """Of prompt plus emitted tokens: raises CallError where they do not fit together."""
    if num_tokens < 1:
        raise invalid("token_ids is empty, at least 1 is needed")
    if not 1 <= num_prompt_tokens <= num_tokens:
        raise invalid(
            f"num_prompt_tokens is {num_prompt_tokens}, limit [1, {num_tokens}] (of token_ids)"
        )
    if num_tokens - num_prompt_tokens >= max_tokens:
        raise invalid(
            f"token_ids holds {num_tokens - num_prompt_tokens} emitted tokens already, "
            f"sampling.max_tokens is {max_tokens}"
        )
    if num_prompt_tokens + max_tokens > context_length:
        raise invalid(
            f"num_prompt_tokens {num_prompt_tokens} + sampling.max_tokens {max_tokens} "
            f"exceed the context of {context_length}"
        )


def check_cache_salt(cache_salt: str) -> None:
    """Raises CallError where it is too long."""
    size = len(cache_salt.encode())
    if size > MAX_CACHE_SALT_BYTES:
        raise invalid(f"cache_salt has {size} bytes, limit {MAX_CACHE_SALT_BYTES}")


def read_num_answers(num_answers: int) -> int:
    """0 means 1; raises CallError where there are too many."""
    if not 0 <= num_answers <= MAX_ANSWERS:
        raise invalid(f"num_answers is {num_answers}, limit [0, {MAX_ANSWERS}] (0 means 1)")
    return num_answers or 1


def read_priority(priority: common_pb2.Priority.ValueType) -> Priority:
    """Raises CallError where it is none that this release knows."""
    try:
        return _PRIORITIES[priority]
    except KeyError:
        raise invalid(f"priority is {priority}, limit [0, {max(_PRIORITIES)}]") from None
