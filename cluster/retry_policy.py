"""retry_delay_s: whether a client asks again after an error, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import grpc

from legato.protos.never_retry import NEVER_RETRY
from legato.protos.status_details import read_details

if TYPE_CHECKING:
    from collections.abc import Iterable


# Of the routers of one service that ends, those that have ended are not to be reached, and those of
# another service answer sooner.
ENDING_PATIENCE_S = 2.0


@dataclass(frozen=True)
class RetryOptions:
    """How patient a client is. A request's deadline bounds all its tries together."""

    first_backoff_s: float = 0.1  # where the error has no hint; doubles with each round of routers
    max_backoff_s: float = 2.0
    jitter: float = 0.25  # of a delay, in [0, 1]: many clients must not come back at once
    max_outage_s: float = 60.0  # no router takes the request and no token comes: given up

    def __post_init__(self) -> None:
        for name in ("first_backoff_s", "max_backoff_s", "max_outage_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}, limit above 0 and finite")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter is {self.jitter}, limit [0, 1]")


@dataclass(frozen=True)
class Failure:
    """How a call ended."""

    code: grpc.StatusCode
    message: str
    retry_after_s: float | None = None  # the server's hint
    is_final: bool = False  # the server's word that no try would go better
    reason: str = ""  # the server's, for programs: see docs/api.md
    remedy: str = ""  # the server's, one sentence


def failure_of(error: grpc.RpcError) -> Failure:
    """What a blocking or an asyncio call raised that its caller did not cancel."""
    found = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    trailers = tuple(found)
    code, message = error.code(), error.details() or error.code().name
    # Other words of gRPC's for a connection that broke, or a server that ended amid the call.
    is_cut = code is grpc.StatusCode.UNKNOWN and message.startswith("Stream removed")
    if is_cut or code is grpc.StatusCode.CANCELLED:
        code = grpc.StatusCode.UNAVAILABLE
    details = read_details(trailers)
    return Failure(
        code,
        message,
        details.retry_after_s,
        is_final=NEVER_RETRY in trailers or speaks_http1(code, message),
        reason=details.reason,
        remedy=details.remedy,
    )


def speaks_http1(code: grpc.StatusCode, message: str) -> bool:
    """gRPC says that what listens there is a web server, such as the service's HTTP endpoint."""
    return code is grpc.StatusCode.UNAVAILABLE and "connect an http1.x server" in message


@dataclass(frozen=True)
class Setting:
    """Where the request stands."""

    num_failures: int  # in a row, this one included: without a token between them
    num_routers: int
    left_s: float  # until the deadline
    outage_s: float  # since the first of the failures that were UNAVAILABLE; 0 at that one
    num_ended: int = 0  # of the routers: they said of late that their service ends, on purpose
    ending_s: float = 0.0  # since the first of them said so


def retry_delay_s(
    failure: Failure, setting: Setting, options: RetryOptions, draw: float
) -> float | None:
    """Seconds until the next try, on another router where there is one; None: to be told as it is.

    UNAVAILABLE, which a broken connection is too, sends a request to each other router at once, and
    then through all of them again after a pause. Where a router says that its service ends, nobody
    waits for it to come back: the others have ENDING_PATIENCE_S, for they may be of the same
    service. A router that is killed, and started again, says nothing of the kind.

    RESOURCE_EXHAUSTED is tried again where and when the server says so; without its hint it is a
    message that is too large, and will be tomorrow. All else is for the caller. Nobody waits for a
    try that would come behind the deadline. `draw` is uniform in [0, 1): a hint is never undercut,
    a backoff varies both ways.
    """
    if failure.is_final:
        return None
    if failure.code is grpc.StatusCode.UNAVAILABLE:
        if setting.num_ended >= setting.num_routers:
            return None
        rounds, others_tried = divmod(setting.num_failures, setting.num_routers)
        if others_tried != 0:
            delay_s = 0.0
        elif failure.retry_after_s is not None:
            delay_s = failure.retry_after_s * (1 + options.jitter * draw)
        else:
            backoff_s = options.first_backoff_s * 2.0 ** min(rounds - 1, 32)
            delay_s = min(options.max_backoff_s, backoff_s) * (1 + options.jitter * (2 * draw - 1))
        if setting.outage_s + delay_s > options.max_outage_s:
            return None
        if setting.num_ended and setting.ending_s + delay_s > ENDING_PATIENCE_S:
            return None
    elif failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED and failure.retry_after_s is not None:
        delay_s = failure.retry_after_s * (1 + options.jitter * draw)
    else:
        return None
    return delay_s if delay_s < setting.left_s else None
