"""GuideBook: guides over one model's vocabulary, from which matchers are made."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from legato.text.guide_matcher import GuideMatcher, clear_bit, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from llguidance import LLTokenizer

    from legato.text.guide import Guide
    from legato.text.guide_vocabulary import GuideVocabulary

# They bound the time (a quarter of a second to compile, milliseconds for a mask) and the memory
# (some 20 MB for an answer) of what a guide may ask for.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
MAX_CHECKED = 64  # of those used last
# Where compiling takes longer in spite of all limits, who asked is told so by then.
COMPILE_TIMEOUT_S = 2.0
_NUM_THREADS = 2


class GuideBook:
    """Thread-safe. The vocabulary is loaded with the first guide: whoever serves none does not pay
    for it.

    Each matcher is compiled by itself. llguidance's copies of one would share the states of their
    lexer, and with them the bound on these: one answer's end would depend on others.
    """

    def __init__(self, load: Callable[[], GuideVocabulary]) -> None:
        """`load` may take a second. Its ValueError is passed on, each time."""
        self._load = load
        self._vocabulary: GuideVocabulary | None = None
        self._grammars: OrderedDict[Guide, str] = OrderedDict()  # those that were found to be well
        self._lock = threading.Lock()
        self._compiling = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="guides")

    def open(
        self,
        guide: Guide,
        *,
        eos_token_ids: Iterable[int],
        stop_token_ids: Iterable[int],
        ignore_eos: bool,
    ) -> GuideMatcher:
        """A matcher at the start of an answer that ends with these tokens. Takes a millisecond as
        a rule, at most half a second, and a second more the first time.

        Raises:
            ValueError: naming the field and what is wrong: the guide does not compile, no text
                keeps to it, or nothing can end the answer.
        """
        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._load()
                except ValueError as error:
                    raise ValueError(f"sampling.guide: {error}: no guide works with it") from error
            vocabulary, grammar = self._vocabulary, self._grammars.get(guide)
        ends = vocabulary.ends(eos_token_ids, stop_token_ids)
        if not ends:
            raise ValueError(
                "sampling.guide is set and the model has no EOS token, limit at least 1 control "
                "token in sampling.stop_token_ids: nothing could end the answer"
            )
        if grammar is None:
            compiling = self._compiling.submit(_checked, guide, vocabulary)
            try:
                grammar = compiling.result(COMPILE_TIMEOUT_S)
            except TimeoutError:
                compiling.cancel()
                raise ValueError(
                    f"{guide.field} takes longer to compile than the limit of "
                    f"{COMPILE_TIMEOUT_S:g} s"
                ) from None
        with self._lock:
            self._grammars[guide] = grammar
            self._grammars.move_to_end(guide)
            if len(self._grammars) > MAX_CHECKED:
                self._grammars.popitem(last=False)
        first = None
        if vocabulary.first_tokenizer is not None:
            first = _compiled(guide, grammar, vocabulary.first_tokenizer)
        matcher = _compiled(guide, grammar, vocabulary.tokenizer)
        return GuideMatcher(vocabulary, matcher, first, ends, ignore_eos=ignore_eos)


def _checked(guide: Guide, vocabulary: GuideVocabulary) -> str:
    """Its grammar, by which at least one token may come first."""
    try:
        grammar = guide.grammar()
    except ValueError as error:
        raise ValueError(f"{guide.field}: {reason_of(str(error))}") from None
    begin = _compiled(guide, grammar, vocabulary.first_tokenizer or vocabulary.tokenizer)
    words = np.frombuffer(begin.compute_bitmask(), np.uint8)
    if begin.is_error():
        reason = reason_of(begin.get_error())
        if reason.startswith("NoExtension"):
            reason = "no text that the model can write keeps to it"
        raise ValueError(f"{guide.field}: {reason}")
    tokens = words.view(np.int32) & vocabulary.text_mask
    clear_bit(tokens, vocabulary.end_id)
    if not tokens.any():
        raise ValueError(f"{guide.field}: no text of at least one token keeps to it")
    return grammar


def _compiled(guide: Guide, grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise ValueError(f"{guide.field}: {reason_of(matcher.get_error())}")
    return matcher
