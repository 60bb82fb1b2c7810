"""AnswerText: the text of one answer, from its tokens, ended by its stop strings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.cluster.text.stop import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.cluster.text.model_text import ModelText


@dataclass(frozen=True)
class AnswerDelta:
    """What some tokens brought."""

    text: str
    # How many of the pushed tokens belong to the answer: all, or those up to and including the
    # one that completed a stop string.
    num_tokens_consumed: int
    stop: str | None  # the stop string that ended the answer with these tokens


class AnswerText:
    """Takes the tokens one by one, so that it knows at which one a stop string is complete.

    A stop string that is complete before `min_tokens` tokens is ignored; one that the
    `min_tokens`-th token completes counts. EOS and other special tokens yield no text.
    """

    def __init__(self, model_text: ModelText, stop: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = model_text.detokenizer()
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._finished = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far; those of a stop string count."""
        return self._num_tokens

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> AnswerDelta:
        """Takes the next tokens. After a stop string or `finish` none are consumed."""
        if self._finished or self.stop is not None:
            return AnswerDelta("", 0, None)
        pieces: list[str] = []
        for consumed, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            pieces.append(self._match(self._detokenizer.push((token_id,))))
            if self.stop is not None:
                return AnswerDelta("".join(pieces), consumed, self.stop)
        return AnswerDelta("".join(pieces), len(token_ids), None)

    def finish(self) -> str:
        """The text held back, at an end by EOS or length.

        Text that only the end made certain can still complete a stop string: look at `stop`.
        """
        if self._finished or self.stop is not None:
            return ""
        self._finished = True
        text = self._match(self._detokenizer.flush())
        return text if self.stop is not None else text + self._matcher.flush()

    def _match(self, text: str) -> str:
        return self._matcher.push(text, may_stop=self._num_tokens >= self._min_tokens)
