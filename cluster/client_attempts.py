"""Attempts: one request of a client over all its tries: where, until when, and when again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import grpc

from legato.cluster.client_errors import CallFailedError
from legato.cluster.client_events import event_of
from legato.cluster.client_stream import StreamState
from legato.cluster.error_reasons import Reason
from legato.cluster.retry_policy import Failure, Setting, retry_delay_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.cluster.client_events import Event
    from legato.cluster.retry_policy import RetryOptions
    from legato.cluster.rotation import Rotation
    from legato.protos import generation_pb2

DEFAULT_TIMEOUT_S = 600.0  # as the service's own
CUT = Failure(grpc.StatusCode.UNAVAILABLE, "the stream ended before the answers did")


@dataclass(frozen=True)
class Attempt:
    """One call."""

    target: str
    request: generation_pb2.GenerateRequest
    timeout_s: float


class Attempts:
    """Does no I/O: the blocking and the asyncio client make the calls that it says."""

    def __init__(
        self,
        request: generation_pb2.GenerateRequest,
        rotation: Rotation,
        options: RetryOptions,
        timeout_s: float | None,
        *,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """The deadline is `timeout_s` from now.

        Raises:
            ValueError: `timeout_s` is not above 0.
        """
        self._timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        if not 0 < self._timeout_s < float("inf"):
            raise ValueError(f"timeout_s is {timeout_s}, limit above 0 and finite")
        self.state = StreamState(request)
        self.num_attempts = 0
        self._rotation = rotation
        self._options = options
        self._now = now
        self._draw = draw
        self._deadline_s = now() + self._timeout_s
        self._target = ""
        self._tried: set[str] = set()  # in this round
        self._answered = False  # the present call has had a message
        self._num_failures = 0  # in a row, without a message between them
        self._out_since_s: float | None = None
        # Without a message since: routers that said that their service ends, and the first word.
        self._ended: set[str] = set()
        self._ending_since_s = 0.0
        self._end_word: Failure | None = None

    @property
    def request_id(self) -> str:
        """Of all tries."""
        return self.state.request.request_id

    @property
    def done(self) -> bool:
        """Every answer has finished."""
        return self.state.done

    def next(self) -> Attempt:
        """The call to be made now.

        Raises:
            CallFailedError: DEADLINE_EXCEEDED.
        """
        left_s = self._deadline_s - self._now()
        if left_s <= 0:
            raise self._out_of_time("")
        if (self._tried | self._ended).issuperset(self._rotation.targets):
            self._tried.clear()
        self._target = self._rotation.pick(self._tried | self._ended)
        self._tried.add(self._target)
        self._answered = False
        self.num_attempts += 1
        return Attempt(self._target, self.state.next_request(), left_s)

    def take(self, response: generation_pb2.GenerateResponse) -> Event:
        """The call's next message.

        Raises:
            CallFailedError: DATA_LOSS, it is not the stream's next one.
        """
        self.state.take(response)
        if not self._answered:
            self._answered = True
            self._num_failures, self._out_since_s, self._tried = 0, None, {self._target}
            self._ended, self._end_word = set(), None
            self._rotation.answered(self._target)
        return event_of(response)

    def failed(self, failure: Failure) -> float:
        """The call has ended so; returns the seconds to wait before `next`.

        Raises:
            CallFailedError: no other is to be made.
        """
        now_s = self._now()
        left_s = self._deadline_s - now_s
        if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise self._out_of_time(failure.message)
        self._num_failures += 1
        if failure.code is grpc.StatusCode.UNAVAILABLE:
            self._rotation.failed(self._target)
            if self._out_since_s is None:
                self._out_since_s = now_s
            if failure.reason == Reason.SHUTTING_DOWN.name:
                self._ended.add(self._target)
                if self._end_word is None:
                    self._end_word, self._ending_since_s = failure, now_s
                failure = replace(failure, retry_after_s=None)  # it is of this router alone
        else:
            self._out_since_s = None
        setting = Setting(
            num_failures=self._num_failures,
            num_routers=len(self._rotation.targets),
            left_s=left_s,
            outage_s=0.0 if self._out_since_s is None else now_s - self._out_since_s,
            num_ended=len(self._ended),
            ending_s=0.0 if self._end_word is None else now_s - self._ending_since_s,
        )
        delay_s = retry_delay_s(failure, setting, self._options, self._draw())
        if delay_s is None:
            raise CallFailedError(self.request_id, self._last_word(failure))
        return delay_s

    def cancelled(self, reason: str) -> CallFailedError:
        """What ends the stream when its own client ends it."""
        return CallFailedError(self.request_id, Failure(grpc.StatusCode.CANCELLED, reason))

    def _last_word(self, failure: Failure) -> Failure:
        """Where a service was ended that is why, whatever its other routers' ports say."""
        word = self._end_word
        if word is None or failure.code is not grpc.StatusCode.UNAVAILABLE:
            return failure
        message = (
            f"{word.message} (tokens until then: {self.state.num_tokens}), "
            "and no other router takes the request"
        )
        return replace(word, message=message)

    def _out_of_time(self, last: str) -> CallFailedError:
        message = (
            f"the deadline of {self._timeout_s:g} s passed before the answer ended "
            f"(tokens until then: {self.state.num_tokens})"
        )
        if last and "Deadline Exceeded" not in last:  # gRPC's own word for it
            message += f"; the service: {last}"
        return CallFailedError(self.request_id, Failure(grpc.StatusCode.DEADLINE_EXCEEDED, message))
