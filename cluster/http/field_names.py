"""FieldNames: the router's errors in the words of the HTTP body that the request came in."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from legato.cluster.error_reasons import Reason, violation_of
from legato.cluster.errors import RequestError
from legato.cluster.http.error_response import HttpError, wrong_field

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from legato.cluster.http.chat_fields import ChatFields
    from legato.cluster.http.completion_fields import CompletionFields
    from legato.cluster.http.shared_fields import SharedFields

_LIMIT = ", limit "
_WRONG = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
_GUIDE = {
    "guide.json_schema": "response_format.json_schema.schema",
    "guide.json_object": "response_format.type",
    "guide": "response_format",
}


@dataclass(frozen=True)
class FieldNames:
    """Of one request over HTTP.

    `names` has the fields of GenerateRequest and SamplingParams that are called otherwise,
    `phrases` what limits say of other fields. `prompt` is what all kinds of prompt are here, and
    with `several` there is a list of them.
    """

    prompt: str
    several: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    phrases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_chat(cls, fields: ChatFields) -> FieldNames:
        """Of POST /v1/chat/completions."""
        names = {"logprobs": "top_logprobs", **_GUIDE, **_max_tokens(fields)}
        phrases = {
            ", or 0 with prompt_logprobs": "",
            "as `text` or `token_ids`": "to /v1/completions",
            **_max_tokens(fields),
        }
        return cls("messages", names=names, phrases=phrases)

    @classmethod
    def of_completion(cls, fields: CompletionFields) -> FieldNames:
        """Of POST /v1/completions."""
        names = {"prompt_logprobs": "logprobs", **_GUIDE, **_max_tokens(fields)}
        phrases = {"with prompt_logprobs": "with echo and logprobs", **_max_tokens(fields)}
        return cls("prompt", several=fields.prompt.several, names=names, phrases=phrases)

    @contextmanager
    def used(self, prompt: int = 0) -> Iterator[None]:
        """What is raised within uses them; `prompt`: the number of the one that it is about."""
        try:
            yield
        except RequestError as error:
            raise self._told(error, prompt) from error

    def _told(self, error: RequestError, prompt: int) -> RequestError:
        if isinstance(error, HttpError) or error.code not in _WRONG:
            return error
        found = violation_of(error.message)
        if found is None:
            return error
        name = self._name(found.field.removeprefix("sampling."), prompt)
        end = error.message.index(found.field) + len(found.field)
        return wrong_field(name, self._in_words(error.message[end:], error), error.reason)

    def _name(self, path: str, prompt: int) -> str:
        for kind in ("text", "token_ids", "prompt"):
            if path == kind or path.startswith(f"{kind}["):
                place = f"[{prompt}]" if self.several else ""
                return f"{self.prompt}{place}{path.removeprefix(kind)}"
        for name, here in self.names.items():
            if re.match(rf"{re.escape(name)}(?![a-z_])", path):
                return here + path.removeprefix(name)
        return path

    def _in_words(self, rest: str, error: RequestError) -> str:
        """Values are the client's, and stay as they are."""
        value, limit, words = rest.rpartition(_LIMIT)
        if rest.startswith(" of ") or error.reason is Reason.NO_CHAT_TEMPLATE:
            value, limit, words = "", "", rest  # numbers and our own words alone
        elif not limit:
            return rest
        for theirs, ours in {**self.phrases, "sampling.": ""}.items():
            words = words.replace(theirs, ours)
        return f"{value}{limit}{words}"


def _max_tokens(fields: SharedFields) -> dict[str, str]:
    is_new = fields.max_tokens is None and fields.max_completion_tokens is not None
    return {"max_tokens": "max_completion_tokens"} if is_new else {}
