"""Answer: what of one request's answer has come so far, over all its attempts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from legato.cluster.errors import invalid
from legato.cluster.worker_calls import WorkerFaultError
from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.cluster.errors import RequestError
    from legato.cluster.request import RequestSpec
    from legato.cluster.resumption import Received
    from legato.protos import worker_pb2


class TextDelta(Protocol):
    """What a push of tokens brought; `legato.cluster.text.answer_text.AnswerDelta`."""

    @property
    def text(self) -> str:
        """Text that may be delivered."""
        ...

    @property
    def num_tokens_consumed(self) -> int:
        """How many of the pushed tokens belong to the answer: fewer only at a stop string."""
        ...

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        ...


class TextSource(Protocol):
    """Tokens to text, stop strings applied; `legato.cluster.text.answer_text.AnswerText`."""

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, at a push or only at `finish`."""
        ...

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Takes the next tokens."""
        ...

    def finish(self) -> str:
        """The text held back, at an end that is no stop string."""
        ...


@dataclass(frozen=True)
class Ending:
    """How the answer ended."""

    finish_reason: common_pb2.FinishReason.ValueType
    stop_reason: str = ""


class Answer:
    """Proves that no token is lost or doubled, and knows when a stop string ended the answer."""

    def __init__(self, spec: RequestSpec, text: TextSource) -> None:
        self._spec = spec
        self._text = text
        self.token_ids: list[int] = []
        self.stopped_by: str | None = None
        self._next = 0  # the index of the token that comes next
        self._num_claimed = 0  # first tokens that are there by the client's word alone
        self._owed_text = ""  # of a resumed answer's end: it belongs to tokens that have come

    def resume(self, received: Received, field: str) -> None:
        """Goes on behind what the client has. May take long for many tokens.

        Raises:
            RequestError: INVALID_ARGUMENT: no stream of ours can have been cut there. `field` is
                the name of `received` in the request.
        """
        token_ids = received.token_ids
        for count, token_id in enumerate(token_ids[:-1], start=1):
            if self._spec.end_after(count, token_id) is not None:
                raise _goes_on(field, len(token_ids), count)
        text = self._text.push(token_ids)
        if text.num_tokens_consumed < len(token_ids):
            raise _goes_on(field, len(token_ids), text.num_tokens_consumed)
        self.token_ids += token_ids
        self._next = self._num_claimed = len(token_ids)
        shown, owed = text.text, ""
        if text.stop is None and self.end is not None:
            owed = self._text.finish()
        self.stopped_by = self._text.stop
        least = len(shown.encode())
        most = least + len(owed.encode())
        if received.num_text_bytes not in (least, most):
            limit = f"{least}" if least == most else f"{least} or {most}"
            raise invalid(
                f"{field}.num_text_bytes is {received.num_text_bytes}, limit {limit}: so many "
                f"have come with its {len(token_ids)} tokens"
            )
        if received.num_text_bytes < most:
            self._owed_text = owed

    @property
    def end(self) -> common_pb2.FinishReason.ValueType | None:
        """Why the tokens so far are all of them, where that can be told without a worker."""
        if self.stopped_by is not None:
            return common_pb2.FINISH_REASON_STOP
        if not self.token_ids:
            return None
        return self._spec.end_after(len(self.token_ids), self.token_ids[-1])

    def begin(self, num_replayed: int) -> None:
        """An attempt begins that knows of so many first tokens: those behind them come again."""
        assert num_replayed <= len(self.token_ids), "more than there are"
        self._next = num_replayed

    @property
    def num_taken(self) -> int:
        """Tokens that the attempt has: those that it began with, and those that came."""
        return self._next

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        return self._spec.max_tokens - len(self.token_ids)

    def take(
        self, tokens: Sequence[worker_pb2.SampledToken], *, finished: bool
    ) -> generation_pb2.Delta:
        """The delta that the next tokens make; with `finished`, all text that is held back too.

        Tokens that come again are no part of it.

        Raises:
            WorkerFaultError: a token is not the next one, one too many, or another than before.
        """
        for index, token in enumerate(tokens, start=self._next):
            if token.index != index:
                raise WorkerFaultError(f"token {token.index} came where {index} was expected")
        if self._next + len(tokens) > self._spec.max_tokens:
            raise WorkerFaultError(
                f"{len(tokens)} tokens came where at most {self._spec.max_tokens - self._next} "
                f"were left"
            )
        tokens = self._without_known(tokens, finished=finished)
        offset = len(self.token_ids)
        ids = [token.token_id for token in tokens]
        text = self._text.push(ids)
        if text.stop is not None:
            tokens, ids = tokens[: text.num_tokens_consumed], ids[: text.num_tokens_consumed]
        self.token_ids += ids
        delta = generation_pb2.Delta(
            text=self._owed_text + text.text, token_ids=ids, token_offset=offset
        )
        self._owed_text = ""
        if self._spec.sampling.HasField("logprobs"):
            delta.logprobs.extend(token.logprobs for token in tokens)
        if finished and text.stop is None:
            delta.text += self._text.finish()
        self.stopped_by = self._text.stop
        return delta

    def _without_known(
        self, tokens: Sequence[worker_pb2.SampledToken], *, finished: bool
    ) -> Sequence[worker_pb2.SampledToken]:
        """Those that are new."""
        known = self.token_ids[self._next : self._next + len(tokens)]
        for token, before in zip(tokens, known, strict=False):
            if token.token_id != before:
                if token.index < self._num_claimed:
                    raise invalid(
                        f"resume: token {token.index} of an answer is {before}, limit "
                        f"{token.token_id}, which the model draws there"
                    )
                raise WorkerFaultError(
                    f"token {token.index} is {token.token_id} where it was {before} before"
                )
        self._next += len(tokens)
        if finished and self._next < len(self.token_ids):
            if self._next < self._num_claimed:
                raise _goes_on("resume: an answer", self._num_claimed, self._next)
            raise WorkerFaultError(
                f"the answer ended after {self._next} tokens where it went on before"
            )
        return tokens[len(known) :]


def _goes_on(field: str, num_tokens: int, num_at_end: int) -> RequestError:
    return invalid(f"{field} has {num_tokens} tokens, limit {num_at_end}: the answer ends there")
