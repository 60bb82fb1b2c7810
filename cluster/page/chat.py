"""ChatRun: one question from the live page, token by token, with the way that it took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from legato.cluster.errors import shown
from legato.cluster.http.error_response import wrong_field
from legato.cluster.http.field_names import FieldNames
from legato.cluster.prompt_ids import MAX_MESSAGES
from legato.cluster.timings import Phase
from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.cluster.page.live_response import Write
    from legato.cluster.router import Router

_FIELDS = {"messages", "max_tokens", "temperature"}
_NAMES = FieldNames("messages", phrases={", or 0 with prompt_logprobs": ""})
_COUNTS = (
    "prefill_worker",
    "decode_worker",
    "attempts",
    "moves",
    "retargets",
    "preemptions",
    "kv_bytes_handed_over",
    "kv_transfer_s",
    "prefill_model_s",
    "decode_model_s",
    "ttft_s",
    "total_s",
)


def read_chat(body: Mapping[str, Any], *, has_template: bool) -> generation_pb2.GenerateRequest:
    """Messages as they stand where the model has a template; else the last one's text.

    Raises:
        RequestError: a field is unknown, or not what it is to be.
    """
    for name in body.keys() - _FIELDS:
        rest = f" is no field, limit {', '.join(sorted(_FIELDS))}"
        raise wrong_field(name, rest, name=shown(name))
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise wrong_field("messages", f" is {shown(messages)}, limit a list of 1 to {MAX_MESSAGES}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise wrong_field(
                f"messages[{number}]", f" is {shown(message)}, limit role and content"
            )
        if not all(isinstance(value, str) for value in message.values()):
            raise wrong_field(f"messages[{number}]", f" is {shown(message)}, limit strings")
    sampling = common_pb2.SamplingParams()
    max_tokens, temperature = body.get("max_tokens"), body.get("temperature")
    if max_tokens is not None:
        if type(max_tokens) is not int or not 1 <= max_tokens < 1 << 31:
            raise wrong_field("max_tokens", f" is {shown(max_tokens)}, limit [1, 2147483647]")
        sampling.max_tokens = max_tokens
    if temperature is not None:
        if type(temperature) not in (int, float) or not 0 <= temperature <= 100:
            raise wrong_field("temperature", f" is {shown(temperature)}, limit [0, 100]")
        sampling.temperature = temperature
    if not has_template:
        return generation_pb2.GenerateRequest(text=messages[-1]["content"], sampling=sampling)
    chat = generation_pb2.ChatMessages(
        messages=[generation_pb2.ChatMessage(**message) for message in messages]
    )
    return generation_pb2.GenerateRequest(messages=chat, sampling=sampling)


class ChatRun:
    """Writes `tokens` events, then one `finish`; times are seconds since the request came."""

    def __init__(
        self, router: Router, request: generation_pb2.GenerateRequest, headers: Mapping[str, str]
    ) -> None:
        self._router = router
        self._request = request
        self._headers = headers

    async def serve(self, write: Write) -> None:
        """Raises RequestError as the router does."""
        began_s = time.monotonic()

        async def deliver(response: generation_pb2.GenerateResponse) -> None:
            at_s = time.monotonic() - began_s
            if response.HasField("delta"):
                delta = response.delta
                tokens = {"text": delta.text, "count": len(delta.token_ids), "at_s": at_s}
                await write("tokens", tokens)
            else:
                await write("finish", {"at_s": at_s, **finish_of(response)})

        with _NAMES.used():
            await self._router.generate(self._request, deliver, None, headers=self._headers)


def finish_of(response: generation_pb2.GenerateResponse) -> dict[str, Any]:
    """The last message's figures."""
    finish = response.finish
    reason = common_pb2.FinishReason.Name(finish.finish_reason)
    return {
        "request_id": response.request_id,
        "reason": reason.removeprefix("FINISH_REASON_").lower(),
        "prompt_tokens": finish.usage.prompt_tokens,
        "completion_tokens": finish.usage.completion_tokens,
        "cached_prompt_tokens": finish.usage.cached_prompt_tokens,
        "phases": [
            {"name": phase.name.lower(), "s": getattr(finish.timings, phase.value)}
            for phase in Phase
        ],
        **{name: getattr(finish.timings, name) for name in _COUNTS},
    }
