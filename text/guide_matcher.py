"""GuideMatcher: where one answer stands in its guide, and which tokens may follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.protos.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from llguidance import LLMatcher
    from numpy.typing import NDArray

    from legato.text.guide_vocabulary import GuideEnds, GuideVocabulary

_MAX_REASON_CHARS = 200


class GuideError(ValueError):
    """The guide cannot go on: a token is none that it allows, or it became too complex."""


class GuideMatcher:
    """A pure function of the guide and the tokens emitted: it is never sent anywhere. Whoever takes
    an answer over makes a new one and feeds it what was emitted.

    Of one thread at a time. Make it with `GuideBook.open`.
    """

    def __init__(
        self,
        vocabulary: GuideVocabulary,
        matcher: LLMatcher,
        first: LLMatcher | None,
        ends: GuideEnds,
        *,
        ignore_eos: bool,
    ) -> None:
        """`first`: the same guide over `first_tokenizer`, where there is one. `ignore_eos`: EOS is
        allowed only where nothing else is.
        """
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._first = first
        self._ends = ends
        self._ignore_eos = ignore_eos
        self._num_fed = 0

    def advance(self, output_token_ids: Sequence[int]) -> None:
        """Feeds those of an answer's tokens that it has not had yet; none of them ends the answer.

        Raises:
            GuideError: one of them is none that the guide allows.
        """
        for position in range(self._num_fed, len(output_token_ids)):
            token_id = output_token_ids[position]
            if not self._vocabulary.is_text(token_id):
                raise GuideError(
                    f"token {token_id} at output position {position} is no text, limit what the "
                    "guide allows there"
                )
            fed = self._vocabulary.as_fed(token_id, position)
            if not fed or not self._matcher.consume_tokens(fed):
                raise GuideError(
                    f"token {token_id} at output position {position} is not what the guide allows "
                    "there"
                )
            self._num_fed = position + 1

    @property
    def num_words(self) -> int:
        """Of a mask."""
        return self._vocabulary.num_words

    @property
    def source(self) -> LLMatcher:
        """What computes the next mask: its bits go to `finish`."""
        return self._first if self._first is not None and not self._num_fed else self._matcher

    def finish(self, words: NDArray[np.int32]) -> None:
        """Makes of `source`'s mask, `num_words` words, the mask of the model's tokens, in place.

        Raises:
            GuideError: `source` failed, or no token is left.
        """
        source, vocabulary = self.source, self._vocabulary
        if source.is_error():
            raise GuideError(
                f"it became too complex at output position {self._num_fed}: "
                f"{reason_of(source.get_error())}"
            )
        words &= vocabulary.text_mask
        may_end = has_bit(words, vocabulary.end_id)
        clear_bit(words, vocabulary.end_id)
        goes_on = bool(words.any())
        if may_end:
            ends = set(self._ends.stops)
            if not (self._ignore_eos and goes_on):
                ends |= self._ends.eos
            for token_id in ends:
                set_bit(words, token_id)
            goes_on = goes_on or bool(ends)
        if not goes_on:
            raise GuideError(f"no token can follow at output position {self._num_fed}")


def reason_of(text: str) -> str:
    """The sentence in what llguidance says, without the state and the grammar that it adds."""
    _, is_regex, text_of_regex = text.partition("regex parse error:")
    lines = (text_of_regex if is_regex else text).partition("\n<")[0].splitlines()
    # Lines that are set in show the place in a text that we may have made ourselves.
    text = " ".join(line.removeprefix("error: ") for line in lines if not line.startswith("   "))
    return printable(" ".join(text.split())[:_MAX_REASON_CHARS])


def has_bit(words: NDArray[np.int32], index: int) -> bool:
    """Whether that token's is set."""
    return bool((int(words[index // 32]) >> (index % 32)) & 1)


def set_bit(words: NDArray[np.int32], index: int) -> None:
    """Sets that token's."""
    words.view("uint32")[index // 32] |= 1 << (index % 32)


def clear_bit(words: NDArray[np.int32], index: int) -> None:
    """Clears that token's."""
    words.view("uint32")[index // 32] &= ~(1 << (index % 32)) & 0xFFFFFFFF
