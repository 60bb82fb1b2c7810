"""Outcome: what became of one request, on its client's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import grpc

from legato.protos import common_pb2

if TYPE_CHECKING:
    from legato.protos import generation_pb2, generation_pb2_grpc

HINT = "retry-after-ms"
SERVER_TIME = "server-time-us"


class End(Enum):
    """How a request ended."""

    FINISHED = "finished"  # within its deadline: the call ends with it
    REFUSED = "refused"  # RESOURCE_EXHAUSTED
    LATE = "late"  # DEADLINE_EXCEEDED
    FAILED = "failed"  # anything else: there is to be none


@dataclass(frozen=True)
class Outcome:
    """Times are on the monotonic clock."""

    end: End
    sent_s: float
    ended_s: float
    batch: bool
    num_tokens: int = 0
    ttft_s: float | None = None
    hint_ms: int | None = None
    server_s: float | None = None  # from the handler's beginning to the error, as the router says
    text: str = ""

    @property
    def latency_s(self) -> float:
        """From sending to the end."""
        return self.ended_s - self.sent_s


_ENDS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: End.REFUSED,
    grpc.StatusCode.DEADLINE_EXCEEDED: End.LATE,
}


async def ask(
    stub: generation_pb2_grpc.GenerationAsyncStub,
    request: generation_pb2.GenerateRequest,
    timeout_s: float,
) -> Outcome:
    """Sends it, reads to the end, and never raises for what the service says."""
    batch = request.priority == common_pb2.PRIORITY_BATCH
    sent_s, ttft_s, num_tokens = time.monotonic(), None, 0
    call = stub.Generate(request, timeout=timeout_s)
    try:
        async for response in call:
            if response.HasField("delta"):
                num_tokens += len(response.delta.token_ids)
                ttft_s = time.monotonic() - sent_s if ttft_s is None else ttft_s
    except grpc.aio.AioRpcError as error:
        end = _ENDS.get(error.code(), End.FAILED)
        trailers = dict(error.trailing_metadata() or ())
        hint_ms = int(trailers[HINT]) if HINT in trailers else None
        server_s = int(trailers[SERVER_TIME]) / 1e6 if SERVER_TIME in trailers else None
        text = f"{error.code().name}: {error.details()}"
    else:
        end, hint_ms, server_s, text = End.FINISHED, None, None, ""
    ended_s = time.monotonic()
    return Outcome(end, sent_s, ended_s, batch, num_tokens, ttft_s, hint_ms, server_s, text)
