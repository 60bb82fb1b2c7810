"""error_response: a RequestError as OpenAI's clients expect it: status, headers, body."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from starlette.responses import Response

from legato.cluster.error_reasons import Reason
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
WRONG_FIELD = ErrorKind(400, _INVALID)
# What gRPC has no code for.
MODEL_NOT_FOUND = ErrorKind(404, _INVALID, "model_not_found")
NO_SUCH_ROUTE = ErrorKind(404, _INVALID, "unknown_url")
WRONG_METHOD = ErrorKind(405, _INVALID, "method_not_allowed")
BODY_TOO_LARGE = ErrorKind(413, _INVALID, "request_too_large")
WRONG_MEDIA_TYPE = ErrorKind(415, _INVALID, "unsupported_media_type")


class HttpError(RequestError):
    """One of a kind that gRPC has no code for, or about a field of the body."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        code: grpc.StatusCode = _CODE.INVALID_ARGUMENT,
        reason: Reason | None = None,
    ) -> None:
        super().__init__(code, message, reason=reason)
        self.kind = kind
        self.param = param


def wrong_field(
    param: str, rest: str, reason: Reason = Reason.INVALID_FIELD, *, name: str | None = None
) -> HttpError:
    """A 400 about that field of the body. `rest`: of the sentence, from behind the field's name,
    which `name` is where the field's own is not to be printed as it stands.
    """
    message = f"{param if name is None else name}{rest}"
    return HttpError(WRONG_FIELD, message, param=param, code=reason.code, reason=reason)


def error_object(error: RequestError) -> dict[str, dict[str, str | None]]:
    """The body. `param` is the field that is at fault, where one of the client's body is."""
    kind = _kind(error)
    return {
        "error": {
            "message": error.message,
            "type": kind.type,
            "param": error.param if isinstance(error, HttpError) else None,
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
