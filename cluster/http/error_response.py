"""error_response: a RequestError as OpenAI's clients expect it: status, headers, body."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from starlette.responses import Response

from legato.cluster.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class ErrorKind:
    """What a client can tell errors apart by."""

    status: int
    type: str
    code: str = ""  # empty: the name of the error's reason


_CODE = grpc.StatusCode
_INVALID = "invalid_request_error"
_KINDS = {
    _CODE.INVALID_ARGUMENT: ErrorKind(400, _INVALID),
    _CODE.OUT_OF_RANGE: ErrorKind(400, _INVALID),
    _CODE.FAILED_PRECONDITION: ErrorKind(400, _INVALID),
    _CODE.UNIMPLEMENTED: ErrorKind(400, _INVALID),
    _CODE.UNAUTHENTICATED: ErrorKind(401, "authentication_error", "invalid_api_key"),
    _CODE.PERMISSION_DENIED: ErrorKind(403, "permission_error"),
    _CODE.NOT_FOUND: ErrorKind(404, _INVALID),
    _CODE.ALREADY_EXISTS: ErrorKind(409, _INVALID),
    _CODE.ABORTED: ErrorKind(409, _INVALID),
    _CODE.RESOURCE_EXHAUSTED: ErrorKind(429, "rate_limit_error"),
    _CODE.UNAVAILABLE: ErrorKind(503, "service_unavailable_error"),
    _CODE.DEADLINE_EXCEEDED: ErrorKind(504, "timeout_error"),
}
INTERNAL = ErrorKind(500, "server_error")
# What gRPC has no code for.
MODEL_NOT_FOUND = ErrorKind(404, _INVALID, "model_not_found")
NO_SUCH_ROUTE = ErrorKind(404, _INVALID, "unknown_url")
WRONG_METHOD = ErrorKind(405, _INVALID, "method_not_allowed")
BODY_TOO_LARGE = ErrorKind(413, _INVALID, "request_too_large")
WRONG_MEDIA_TYPE = ErrorKind(415, _INVALID, "unsupported_media_type")
# The fields of GenerateRequest that have another name here.
_PROMPTS = ("text", "token_ids", "prompt")
_FIELD = re.compile(r"(?:sampling\.)?([a-z_]+(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)*)")


class HttpError(RequestError):
    """One of a kind that gRPC has no code for."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(_CODE.INVALID_ARGUMENT, message)
        self.kind = kind


def error_object(error: RequestError) -> dict[str, dict[str, str | None]]:
    """The body. `param` is the field where the sentence begins with one."""
    kind = _kind(error)
    message, param = _in_words_of_http(error.message) if kind.status == 400 else (error.message, "")
    return {
        "error": {
            "message": message,
            "type": kind.type,
            "param": param or None,
            "code": kind.code or error.reason.name.lower(),
        }
    }


def error_response(error: RequestError) -> Response:
    """To be sent where no response has begun."""
    headers: dict[str, str] = {}
    status = _kind(error).status
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    elif status >= 409:  # OpenAI's clients would ask again
        headers["x-should-retry"] = "false"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error_object(error), status, headers)


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """`value` as JSON, in UTF-8."""
    content = json.dumps(value, ensure_ascii=False).encode()
    return Response(content, status, headers, "application/json")


def _kind(error: RequestError) -> ErrorKind:
    return error.kind if isinstance(error, HttpError) else _KINDS.get(error.code, INTERNAL)


def _in_words_of_http(message: str) -> tuple[str, str]:
    """The sentence with the names that the client used, and the field that it is about."""
    found = _FIELD.match(message)
    if found is None:
        return message, ""
    field, rest = found[1], message[found.end() :]
    if not rest.startswith((" is ", " has ", ":", " needs ")):
        return message, ""
    name, bracket, index = field.partition("[")
    if name in _PROMPTS:
        field = f"prompt{bracket}{index}"
    return field + rest, field
