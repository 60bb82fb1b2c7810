"""RequestSpec: one validated request, and the rules by which a GenerateRequest becomes one."""

from __future__ import annotations

import functools
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.cluster.error_reasons import Reason
from legato.cluster.errors import invalid, shown
from legato.cluster.known_fields import check_known_fields
from legato.cluster.prompt_ids import chat_ids, check_num_messages, text_ids
from legato.cluster.resumption import parse_resumption
from legato.cluster.sampling_rules import (
    DEFAULT_MAX_TOKENS,
    check_prompt_logprobs,
    check_sampling,
    check_token_ids,
    complete_sampling,
    read_guide,
)
from legato.protos import common_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.cluster.model_limits import ModelLimits
    from legato.cluster.resumption import Resumption
    from legato.cluster.text.model_text import ModelText
    from legato.protos import generation_pb2

MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_CHARS = 128
MAX_N = 128
NUM_SEEDS = 2**63
_PRIORITIES = ", ".join(common_pb2.Priority.keys())


@dataclass(frozen=True)
class RequestSpec:
    """Tokenised and within every limit; nothing downstream has to check again."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: common_pb2.SamplingParams  # complete: every default filled, max_tokens clamped
    stop: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    batch_priority: bool
    cache_salt: str  # with the tenant's in it
    num_answers: int = 1
    resumed: Resumption | None = None  # the stream is the rest of one that broke
    prompt_logprobs: int | None = (
        None  # still to be told: of each prompt token, and the k best there
    )
    tenant: str = ""  # whose token it came with; request ids are a tenant's own
    prompt_only: bool = False  # a token is drawn, for a prompt's worker draws one, and is not told

    @property
    def max_tokens(self) -> int:
        """Most tokens of an answer."""
        return self.sampling.max_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Rows of KV of an answer at its end: the last token's is never written."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def is_guided(self) -> bool:
        """Whether a guide says where an answer may end."""
        return self.sampling.HasField("guide")

    @property
    def open_answers(self) -> list[int]:
        """Indices of those that are to be served: all, but for a resumed stream's finished ones."""
        if self.resumed is None:
            return list(range(self.num_answers))
        return [i for i, received in enumerate(self.resumed.answers) if not received.finished]

    @functools.cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Each ends an answer, once it has min_tokens; with a guide, wherever it comes."""
        eos = () if self.sampling.ignore_eos and not self.is_guided else self.eos_token_ids
        return frozenset(eos).union(self.sampling.stop_token_ids)

    def end_after(
        self, num_tokens: int, last_token_id: int
    ) -> common_pb2.FinishReason.ValueType | None:
        """Why an answer ends with its token number `num_tokens`, as a worker has it, or None.

        Stop strings are another matter.
        """
        may_end = num_tokens > self.sampling.min_tokens or self.is_guided
        if last_token_id in self.end_token_ids and may_end:
            return common_pb2.FINISH_REASON_STOP
        return common_pb2.FINISH_REASON_LENGTH if num_tokens >= self.max_tokens else None

    def seed_of(self, index: int) -> int:
        """What answer `index` draws with: as a request of its own with that seed would."""
        return (self.sampling.seed + index) % NUM_SEEDS

    def sampling_of(self, index: int) -> common_pb2.SamplingParams:
        """For a worker that is to serve answer `index` alone, or all from it on."""
        sampling = common_pb2.SamplingParams()
        sampling.CopyFrom(self.sampling)
        sampling.seed = self.seed_of(index)
        return sampling


def parse_request(
    request: generation_pb2.GenerateRequest, text: ModelText, limits: ModelLimits
) -> RequestSpec:
    """Validates and tokenises. May take long for a long text: run it off the event loop.

    What costs little is checked first, so that a request refused for a number has not been
    tokenised.

    Raises:
        RequestError: the status and a sentence naming field, value and limit.
    """
    # Before every message is looked into.
    check_num_messages(request.messages.messages, least=0)
    check_known_fields(request)
    request_id = _request_id(request.request_id)
    _check_printable("cache_salt", request.cache_salt, MAX_CACHE_SALT_CHARS)
    num_answers = _num_answers(request)
    if request.priority not in common_pb2.Priority.values():
        raise invalid(f"priority is {request.priority}, limit one of {_PRIORITIES}")
    check_sampling(request.sampling, limits.vocab_size)
    resumed = parse_resumption(request, num_answers, limits.vocab_size)
    asked = request.sampling if resumed is None else resumed.settle(request.sampling)
    prompt = _prompt(request, text, limits)
    check_prompt_logprobs(asked, len(prompt))
    told = resumed is not None and resumed.has_begun
    wants_scores = asked.HasField("prompt_logprobs") and not told
    if resumed is not None and resumed.max_tokens is not None:
        max_tokens = _kept_max_tokens(resumed.max_tokens, len(prompt), limits)
    else:
        max_tokens = _max_tokens(asked, len(prompt), num_answers, limits)
    eos_token_ids = tuple(i for i in text.eos_token_ids if i < limits.vocab_size)
    _check_guide(asked, text, limits.vocab_size, eos_token_ids, resumed)
    return RequestSpec(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=complete_sampling(asked, max_tokens),
        stop=tuple(request.sampling.stop),
        eos_token_ids=eos_token_ids,
        batch_priority=request.priority == common_pb2.PRIORITY_BATCH,
        cache_salt=request.cache_salt,
        num_answers=num_answers,
        resumed=resumed,
        prompt_logprobs=asked.prompt_logprobs if wants_scores else None,
        prompt_only=request.sampling.HasField("max_tokens") and not request.sampling.max_tokens,
    )


def _request_id(asked: str) -> str:
    _check_printable("request_id", asked, MAX_REQUEST_ID_CHARS)
    return asked or uuid.uuid4().hex


def _check_printable(field: str, asked: str, max_chars: int) -> None:
    if len(asked) > max_chars:
        raise invalid(f"{field} has {len(asked)} chars, limit {max_chars}")
    if not all(" " <= char <= "~" for char in asked):
        raise invalid(f"{field} is {shown(asked)}, limit printable ASCII characters")


def _num_answers(request: generation_pb2.GenerateRequest) -> int:
    if not request.HasField("n"):
        return 1
    if not 1 <= request.n <= MAX_N:
        raise invalid(f"n is {request.n}, limit [1, {MAX_N}]")
    return request.n


def _prompt(
    request: generation_pb2.GenerateRequest, text: ModelText, limits: ModelLimits
) -> Sequence[int]:
    """Token ids of the prompt, within context and prefill pool."""
    special = request.parse_special_tokens
    match request.WhichOneof("prompt"):
        case "text":
            prompt: Sequence[int] = text_ids(
                request.text, text, limits, parse_special_tokens=special
            )
        case "token_ids":
            prompt = request.token_ids.ids
            if not prompt:
                raise invalid("token_ids is empty, limit at least 1 token")
        case "messages":
            messages = request.messages.messages
            prompt = chat_ids(messages, text, limits, parse_special_tokens=special)
        case _:
            raise invalid("prompt is not set, limit exactly one of text, token_ids, messages")
    _check_length(len(prompt), limits)
    if request.HasField("token_ids"):
        check_token_ids("token_ids", prompt, limits.vocab_size)
    return prompt


def _check_length(num_tokens: int, limits: ModelLimits) -> None:
    if num_tokens >= limits.context_length:
        raise invalid(
            f"prompt has {num_tokens} tokens, limit {limits.context_length - 1}: the context is "
            f"{limits.context_length}, and at least 1 token must be left for the answer",
            Reason.CONTEXT_LENGTH_EXCEEDED,
        )
    if num_tokens > limits.prefill_kv_tokens:
        raise invalid(
            f"prompt has {num_tokens} tokens, limit {limits.prefill_kv_tokens}: the KV pool of "
            "the largest prefill worker",
            Reason.CONTEXT_LENGTH_EXCEEDED,
        )


def _max_tokens(
    asked: common_pb2.SamplingParams, num_prompt: int, num_answers: int, limits: ModelLimits
) -> int:
    """What was asked, at least 1, clamped to the context; unset, also to the decode pool."""
    reason = Reason.CONTEXT_LENGTH_EXCEEDED
    room = limits.context_length - num_prompt
    # The last token's KV is never written, and a single token never leaves prefill.
    pool_room = limits.decode_rows(num_prompt, num_answers) - num_prompt + 1
    if not asked.HasField("max_tokens"):
        if pool_room >= min(2, room):
            return max(1, min(DEFAULT_MAX_TOKENS, room, pool_room))
        if num_answers > 1:
            raise invalid(_too_large(num_prompt, 2, num_answers, limits), reason)
        raise invalid(
            f"prompt has {num_prompt} tokens, limit {limits.decode_kv_tokens - 1}: the KV "
            f"pool of the largest decode worker, {limits.decode_kv_tokens} tokens, must hold "
            "it and the answer (only max_tokens 1 needs no decode worker)",
            reason,
        )
    max_tokens = min(max(1, asked.max_tokens), room)
    if max_tokens > max(1, pool_room):
        raise invalid(_too_large(num_prompt, max_tokens, num_answers, limits), reason)
    return max_tokens


def _kept_max_tokens(settled: int, num_prompt: int, limits: ModelLimits) -> int:
    """Of a stream that has begun. Where the workers that could hold it are lost meanwhile, it waits
    for others, as it would have at the router that it began at.
    """
    room = limits.context_length - num_prompt
    if settled > room:
        raise invalid(
            f"resume.start.max_tokens is {settled}, limit {room}: what the context of "
            f"{limits.context_length} tokens leaves"
        )
    return settled


def _check_guide(
    asked: common_pb2.SamplingParams,
    text: ModelText,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    resumed: Resumption | None,
) -> None:
    """Compiles it, and sees that what came of a resumed stream keeps to it."""
    guide = read_guide(asked)
    if guide is None:
        return
    book, ends = text.guides(vocab_size), {*eos_token_ids, *asked.stop_token_ids}
    emitted = [()] if resumed is None else [answer.token_ids for answer in resumed.answers]
    for index, token_ids in enumerate(emitted):
        try:
            matcher = book.open(
                guide,
                eos_token_ids=eos_token_ids,
                stop_token_ids=asked.stop_token_ids,
                ignore_eos=asked.ignore_eos,
            )
        except ValueError as error:
            raise invalid(str(error)) from None
        last = len(token_ids) - 1
        before_end = token_ids[:last] if token_ids and token_ids[last] in ends else token_ids
        try:
            matcher.advance(before_end)
        except ValueError as error:
            raise invalid(f"resume.answers[{index}].token_ids: {error}") from None


def _too_large(num_prompt: int, max_tokens: int, num_answers: int, limits: ModelLimits) -> str:
    rows = num_prompt + max_tokens - 1
    asked = f"prompt of {num_prompt} tokens + max_tokens {max_tokens} - 1 needs {rows} KV tokens"
    pool = f"limit {limits.decode_kv_tokens}: the KV pool of the largest decode worker"
    if num_answers == 1:
        return f"{asked}, {pool}"
    size = limits.decode_block_size
    shared = num_prompt // size
    blocks = shared + num_answers * (-(-rows // size) - shared)
    return (
        f"{asked} for each of n {num_answers} answers, {blocks * size} in blocks of {size} of "
        f"which they share {shared}, {pool}"
    )
