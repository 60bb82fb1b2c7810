"""Text or messages to the token ids of a prompt: what Generate and Tokenize make of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.error_reasons import Reason
from legato.cluster.errors import invalid, shown
from legato.cluster.sampling_rules import check_token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.cluster.model_limits import ModelLimits
    from legato.cluster.text.model_text import ModelText
    from legato.protos import generation_pb2

MAX_MESSAGES = 1024


def text_ids(
    asked: str,
    text: ModelText,
    limits: ModelLimits,
    *,
    parse_special_tokens: bool,
    add_bos: bool = True,
) -> list[int]:
    """At least one. May take long for a long text.

    Raises:
        RequestError: INVALID_ARGUMENT naming field, value and limit.
    """
    if not asked:
        raise invalid("text is empty, limit at least 1 token")
    _check_chars("text", len(asked), text, limits)
    ids = text.encode_text(asked, parse_special_tokens=parse_special_tokens, add_bos=add_bos)
    if not ids:
        raise invalid(f"text is {shown(asked)} and has no token, limit at least 1")
    # An id outside means that the tokenizer is larger than the model.
    check_token_ids("text", ids, limits.vocab_size)
    return ids


def chat_ids(
    messages: Sequence[generation_pb2.ChatMessage],
    text: ModelText,
    limits: ModelLimits,
    *,
    parse_special_tokens: bool,
) -> list[int]:
    """At least one; with the template's prompt for an answer. May take long for long messages.

    Raises:
        RequestError: INVALID_ARGUMENT naming field, value and limit; FAILED_PRECONDITION where the
            model has no chat template.
    """
    check_num_messages(messages, least=1)
    if not any(message.content for message in messages):
        raise invalid("messages: every content is empty, limit at least 1 character in one of them")
    for index, message in enumerate(messages):
        if text.has_chat_template and message.role not in text.chat_roles:
            raise invalid(
                f"messages[{index}].role is {shown(message.role)}, "
                f"limit one of {', '.join(text.chat_roles)}"
            )
    _check_chars("messages", sum(len(m.content) for m in messages), text, limits)
    ids = text.encode_chat(
        messages, parse_special_tokens=parse_special_tokens, max_chars=_max_chars(text, limits)
    )
    check_token_ids("messages", ids, limits.vocab_size)
    return ids


def check_num_messages(messages: Sequence[generation_pb2.ChatMessage], *, least: int) -> None:
    """Raises RequestError where there are too few or too many."""
    if not least <= len(messages) <= MAX_MESSAGES:
        raise invalid(f"messages has {len(messages)} entries, limit [1, {MAX_MESSAGES}]")


def _max_chars(text: ModelText, limits: ModelLimits) -> int:
    """Refused before tokenising: no token stands for more characters than this."""
    return limits.context_length * text.max_chars_per_token


def _check_chars(field: str, num_chars: int, text: ModelText, limits: ModelLimits) -> None:
    max_chars = _max_chars(text, limits)
    if num_chars > max_chars:
        raise invalid(
            f"{field} has {num_chars} chars, limit {max_chars}: more cannot fit the context of "
            f"{limits.context_length} tokens",
            Reason.CONTEXT_LENGTH_EXCEEDED,
        )
