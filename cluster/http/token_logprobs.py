"""Logprobs of tokens in the two forms that OpenAI's endpoints have for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from legato.protos import common_pb2

    TokenText = Callable[[int], str]
    Entries = Sequence[common_pb2.TokenLogprobs]

LEAST = -9999.0  # in the place of minus infinity, which JSON cannot say; as OpenAI does it
_UNKNOWN = "\ufffd"


def chat_logprobs(token_ids: Sequence[int], entries: Entries, text: TokenText) -> dict[str, Any]:
    """`{"content": […]}`, an entry a token."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        named = _named(text(token_id), entry.logprob)
        named["top_logprobs"] = [_named(text(top.token_id), top.logprob) for top in entry.top]
        content.append(named)
    return {"content": content}


def completion_logprobs(
    token_ids: Sequence[int], entries: Entries, text: TokenText, offset: int
) -> dict[str, Any]:
    """Four lists, an item a token. `offset`: characters that come before, of all tokens' texts.

    What follows on nothing has no logprob: a prompt's first token. The token itself is among
    `top_logprobs` even where it is not one of the likeliest. Where two tokens have the same text,
    the likelier one stands for both.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        token = text(token_id)
        tokens.append(token)
        offsets.append(offset)
        offset += len(token)
        if not entry.HasField("logprob"):
            logprobs.append(None)
            tops.append(None)
            continue
        logprobs.append(max(entry.logprob, LEAST))
        top: dict[str, float] = {}
        for item in entry.top:
            top.setdefault(text(item.token_id), max(item.logprob, LEAST))
        top.setdefault(token, max(entry.logprob, LEAST))
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Of tokens that follow each other."""
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}


def _named(token: str, logprob: float) -> dict[str, Any]:
    """`bytes` is null of a token that is a part of a character: its text does not tell them."""
    is_part = _UNKNOWN in token
    return {
        "token": token,
        "logprob": max(logprob, LEAST),
        "bytes": None if is_part else list(token.encode()),
    }
