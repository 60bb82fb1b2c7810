"""Answer: what of one request's answer has come so far, over all its attempts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from legato.cluster.worker_calls import WorkerFaultError
from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.cluster.request import RequestSpec
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

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        return self._spec.max_tokens - len(self.token_ids)

    def take(
        self, tokens: Sequence[worker_pb2.SampledToken], *, finished: bool
    ) -> generation_pb2.Delta:
        """The delta that the next tokens make; with `finished`, all text that is held back too.

        Raises:
            WorkerFaultError: a token is not the next one, or one too many.
        """
        offset = len(self.token_ids)
        for index, token in enumerate(tokens, start=offset):
            if token.index != index:
                raise WorkerFaultError(f"token {token.index} came where {index} was expected")
        if len(tokens) > self.num_left:
            raise WorkerFaultError(
                f"{len(tokens)} tokens came where at most {self.num_left} were left"
            )
        ids = [token.token_id for token in tokens]
        text = self._text.push(ids)
        if text.stop is not None:
            tokens, ids = tokens[: text.num_tokens_consumed], ids[: text.num_tokens_consumed]
        self.token_ids += ids
        delta = generation_pb2.Delta(text=text.text, token_ids=ids, token_offset=offset)
        if self._spec.sampling.HasField("logprobs"):
            delta.logprobs.extend(token.logprobs for token in tokens)
        if finished and text.stop is None:
            delta.text += self._text.finish()
        self.stopped_by = self._text.stop
        return delta
