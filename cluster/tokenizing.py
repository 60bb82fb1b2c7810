"""tokenize, detokenize: text to token ids and back, as Generate does it, for a client to see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.errors import invalid
from legato.cluster.known_fields import check_known_fields
from legato.cluster.prompt_ids import chat_ids, check_num_messages, text_ids
from legato.cluster.sampling_rules import check_token_ids
from legato.protos import generation_pb2

if TYPE_CHECKING:
    from legato.cluster.model_limits import ModelLimits
    from legato.cluster.text.model_text import ModelText

# Ids and their texts stay below 4 MiB, which clients take of one message as they come.
MAX_TOKENS = 1 << 18


def tokenize(
    request: generation_pb2.TokenizeRequest, text: ModelText, limits: ModelLimits
) -> generation_pb2.TokenizeResponse:
    """May take long for a long text: run it off the event loop.

    Raises:
        RequestError: the status and a sentence naming field, value and limit.
    """
    check_num_messages(request.messages.messages, least=0)
    check_known_fields(request)
    special = request.parse_special_tokens
    field = request.WhichOneof("prompt")
    if request.HasField("add_bos") and field != "text":
        raise invalid(f"add_bos is {request.add_bos}, limit unset where the prompt is not text")
    if field == "text":
        add_bos = request.add_bos if request.HasField("add_bos") else True
        ids = text_ids(request.text, text, limits, parse_special_tokens=special, add_bos=add_bos)
    elif field == "messages":
        ids = chat_ids(request.messages.messages, text, limits, parse_special_tokens=special)
    else:
        raise invalid("prompt is not set, limit exactly one of text, messages")
    if len(ids) > MAX_TOKENS:
        raise invalid(f"{field} has {len(ids)} tokens, limit {MAX_TOKENS}")
    return generation_pb2.TokenizeResponse(
        token_ids=ids, tokens=[text.token_text(token_id) for token_id in ids]
    )


def detokenize(
    request: generation_pb2.DetokenizeRequest, text: ModelText, limits: ModelLimits
) -> generation_pb2.DetokenizeResponse:
    """May take long for many tokens: run it off the event loop.

    Raises:
        RequestError: the status and a sentence naming field, value and limit.
    """
    check_known_fields(request)
    if len(request.token_ids) > MAX_TOKENS:
        raise invalid(f"token_ids has {len(request.token_ids)} entries, limit {MAX_TOKENS}")
    check_token_ids("token_ids", request.token_ids, limits.vocab_size)
    return generation_pb2.DetokenizeResponse(text=text.decode(request.token_ids))
