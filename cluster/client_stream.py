"""StreamState: what has come of one stream, over all its tries, and what is to be asked next."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

from legato.cluster.client_errors import CallFailedError
from legato.cluster.retry_policy import Failure
from legato.protos import generation_pb2


@dataclass
class AnswerState:
    """Of one answer."""

    token_ids: list[int] = field(default_factory=list)
    num_text_bytes: int = 0
    finished: bool = False


class StreamState:
    """Proves that no token is lost or doubled, whichever routers they come from."""

    def __init__(self, request: generation_pb2.GenerateRequest) -> None:
        """`request` has an id; `n` is what the service will make of it."""
        assert request.request_id, "all tries have one id"
        self.request = request
        num_answers = request.n if request.HasField("n") else 1
        # What is out of range the service refuses.
        self.answers = [AnswerState() for _ in range(min(max(num_answers, 1), 128))]
        self._start: generation_pb2.StreamStart | None = None
        self._asked = False

    @property
    def done(self) -> bool:
        """Every answer has finished."""
        return all(answer.finished for answer in self.answers)

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def max_tokens(self) -> int | None:
        """What the service has made of it; None before anything has come."""
        return None if self._start is None else self._start.max_tokens

    def next_request(self) -> generation_pb2.GenerateRequest:
        """The request as it was given, and from the second try on as the rest of a stream, even
        where nothing has come: an older call may still be in flight.
        """
        if not self._asked:
            self._asked = True
            return self.request
        rest = generation_pb2.GenerateRequest()
        rest.CopyFrom(self.request)
        rest.resume.SetInParent()
        if self._start is not None:
            rest.resume.start.CopyFrom(self._start)
            for answer in self.answers:
                rest.resume.answers.add(
                    token_ids=() if answer.finished else answer.token_ids,
                    num_text_bytes=answer.num_text_bytes,
                    finished=answer.finished,
                )
        return rest

    def take(self, response: generation_pb2.GenerateResponse) -> None:
        """The next message.

        Raises:
            CallFailedError: DATA_LOSS, it is not the next one.
        """
        if response.HasField("start"):
            if self._start is None:
                self._start = response.start
            elif self._start != response.start:
                raise self._fault("another seed, max_tokens or model than the stream began with")
        if self._start is None:
            raise self._fault("the first message without a start")
        if response.request_id != self.request.request_id:
            raise self._fault(f"a message of request {response.request_id!r}")
        if not 0 <= response.index < len(self.answers):
            raise self._fault(f"answer {response.index} of {len(self.answers)}")
        answer = self.answers[response.index]
        if answer.finished:
            raise self._fault(f"a message behind the finish of answer {response.index}")
        if response.HasField("finish"):
            self._take_finish(answer, response)
        else:
            self._take_delta(answer, response)

    def _take_delta(self, answer: AnswerState, response: generation_pb2.GenerateResponse) -> None:
        delta = response.delta
        if delta.token_offset != len(answer.token_ids):
            raise self._fault(
                f"token {delta.token_offset} of answer {response.index} where "
                f"{len(answer.token_ids)} comes next"
            )
        answer.token_ids += delta.token_ids
        answer.num_text_bytes += len(delta.text.encode())

    def _take_finish(self, answer: AnswerState, response: generation_pb2.GenerateResponse) -> None:
        num_tokens = response.finish.usage.completion_tokens
        if num_tokens != len(answer.token_ids):
            raise self._fault(
                f"answer {response.index} with {num_tokens} tokens where "
                f"{len(answer.token_ids)} have come"
            )
        answer.finished = True

    def _fault(self, what: str) -> CallFailedError:
        return CallFailedError(
            self.request.request_id,
            Failure(grpc.StatusCode.DATA_LOSS, f"the router broke the protocol: it sent {what}"),
        )
