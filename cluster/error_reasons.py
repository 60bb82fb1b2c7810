"""Reason: why a request was not served, for programs; and with each what its client can do."""

from __future__ import annotations

import re
from enum import Enum

import grpc

from legato.protos.malformed import MALFORMED, MALFORMED_REMEDY
from legato.protos.status_details import Violation

_Code = grpc.StatusCode


class Reason(Enum):
    """The name goes out as `google.rpc.ErrorInfo.reason`; each has one code and one remedy."""

    # First of each code: what is meant where nothing more is said.
    INVALID_FIELD = (
        _Code.INVALID_ARGUMENT,
        "Set the field that the message names to a value within the limit that it names, or "
        "leave it out, and send the request again.",
    )
    CONTEXT_LENGTH_EXCEEDED = (
        _Code.INVALID_ARGUMENT,
        "Shorten the prompt or ask for fewer tokens, or serve the model with a longer context or "
        "more KV memory.",
    )
    MALFORMED_REQUEST = (_Code.INVALID_ARGUMENT, MALFORMED_REMEDY)
    UNKNOWN_FIELD = (
        _Code.UNIMPLEMENTED,
        "Leave the field out, or ask a service of a release that knows it; `legato status` "
        "tells the release.",
    )
    NOT_IN_THIS_STATE = (
        _Code.FAILED_PRECONDITION,
        "Change first what the message says stands against it, then send the request again.",
    )
    NO_CHAT_TEMPLATE = (
        _Code.FAILED_PRECONDITION,
        "Send the whole prompt as text or token_ids, or serve a model that has a chat template.",
    )
    OTHER_MODEL = (
        _Code.FAILED_PRECONDITION,
        "Send the request anew, without resume, or to a router of the model that began the answer.",
    )
    UNKNOWN_WORKER = (
        _Code.NOT_FOUND,
        "Use an id that `legato status` shows.",
    )
    UNKNOWN_NODE = (
        _Code.NOT_FOUND,
        "Use one of the addresses that the message names, or the host name of such a node.",
    )
    REQUEST_IN_FLIGHT = (
        _Code.ALREADY_EXISTS,
        "Give each request an id of its own, or none; or wait for the end of the one in flight.",
    )
    STREAM_RESUMED = (
        _Code.ABORTED,
        "Read the newer call, which has the rest of the answer.",
    )
    OVERLOADED = (
        _Code.RESOURCE_EXHAUSTED,
        "Send the request again after the delay of the RetryInfo, or add workers: legato scale.",
    )
    TOO_LATE = (
        _Code.RESOURCE_EXHAUSTED,
        "Send the request again after the delay of the RetryInfo, with a later deadline or "
        "fewer tokens, or add workers: legato scale.",
    )
    DEADLINE_TOO_SHORT = (
        _Code.RESOURCE_EXHAUSTED,
        "Give the call a later deadline, or ask for fewer tokens; to wait and send the same again "
        "does not help.",
    )
    NOT_SERVED_NOW = (
        _Code.UNAVAILABLE,
        "Send the request again after the delay of the RetryInfo; `legato status` tells which "
        "workers are missing, and why.",
    )
    SHUTTING_DOWN = (
        _Code.UNAVAILABLE,
        "Send the request to another router, or again when the service is back.",
    )
    FAILS_ON_EVERY_WORKER = (
        _Code.UNAVAILABLE,
        "Do not send the request again, for it seems to be what its workers die of; report it "
        "with the service's log.",
    )
    DEADLINE_PASSED = (
        _Code.DEADLINE_EXCEEDED,
        "Give the call a later deadline, or ask for fewer tokens; `timings` tell where the "
        "time goes.",
    )
    INTERNAL_FAULT = (
        _Code.INTERNAL,
        "Report it with what the service's log says under the reference in the message.",
    )
    BROKEN_LOGITS = (
        _Code.INTERNAL,
        "Do not send the request again as it is; serve the model with another --dtype, for "
        "fp16 may overflow.",
    )
    NOT_PERMITTED = (
        _Code.PERMISSION_DENIED,
        "Use a token of the role admin: its line in the service's token file says `NAME admin:`.",
    )
    NOT_AUTHENTICATED = (
        _Code.UNAUTHENTICATED,
        "Send the metadata `authorization: Bearer TOKEN`, with a token that the service was given.",
    )

    def __init__(self, code: grpc.StatusCode, remedy: str) -> None:
        self.code = code
        self.remedy = remedy

    @classmethod
    def of(cls, code: grpc.StatusCode) -> Reason:
        """What is meant where nothing more is said; INTERNAL_FAULT of a code that has none."""
        return _FIRST_OF_CODE.get(code, cls.INTERNAL_FAULT)


assert Reason.MALFORMED_REQUEST.name == MALFORMED, "both sides of the wire say the same"
_FIRST_OF_CODE: dict[grpc.StatusCode, Reason] = {}
for _reason in Reason:
    _FIRST_OF_CODE.setdefault(_reason.code, _reason)

# "sampling.top_p is 2, limit (0, 1]": how sentences name field, value and limit.
_SENTENCE = re.compile(
    r"(?:the )?(?P<field>[a-z_]\w*(?:\[-?\d+\]|\.[a-z_]\w*)*)(?::| is| has| holds|(?= of))? "
    r"(?P<value>.*?)(?:, limit (?P<limit>.*?)(?:: .*)?)?",
    re.DOTALL,
)


# Of a wrong field, which the details name.
OF_FIELDS = (Reason.INVALID_FIELD, Reason.CONTEXT_LENGTH_EXCEEDED)


def violation_of(message: str) -> Violation | None:
    """Which field an INVALID_ARGUMENT's sentence is about; None where it does not say so."""
    found = _SENTENCE.fullmatch(message)
    if found is None:
        return None
    return Violation(found["field"], found["value"], found["limit"] or "")
