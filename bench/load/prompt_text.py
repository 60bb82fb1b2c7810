"""PromptText: prompts of words, about as long as asked, for servers that take no token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Short and frequent: most tokenizers have a token for each, with the space before it.
WORDS = tuple(
    """
    the of and to in is that for it as was with be by on not he his but at are this have from or
    had an they which one you were all her she there would their we him been has when who will
    no more if out so up said what its about than into them can only other time new some could
    these two may first then do any like my now over such our man me even most made after also
    did many off before must well back through years much where your way down should because
    long each just state those people too little good world make very year still see own work
    men day get here old life both between being under three never know same last another while
    us might great go come since against right came take used himself few house use place during
    without again home around small however found part school every thought night head city
    water left hand side
    """.split()  # noqa: SIM905  # as a list it would be a page
)


@dataclass(frozen=True)
class PromptText:
    """How many tokens the server makes of words: `overhead` (a template, BOS), and each word's."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    @classmethod
    def measured(cls, few: tuple[int, int], many: tuple[int, int]) -> PromptText:
        """From two prompts' (words, tokens)."""
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        if per_word <= 0:
            raise ValueError(
                f"the server counts {many[1]} tokens in {many[0]} words, and {few[1]} in {few[0]}"
            )
        return cls(per_word, max(0.0, few[1] - few[0] * per_word))

    def num_words(self, num_tokens: int) -> int:
        """At least one."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))


def text_of(numbers: Sequence[int]) -> str:
    """Words by their numbers, below len(WORDS)."""
    return " ".join(WORDS[number] for number in numbers)
