"""GuideBook: guides over one model's vocabulary, from which matchers are made."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher

from legato.text.guide_matcher import GuideMatcher, clear_bit, reason_of
from legato.text.guide_probe import GRAMMAR_LIMITS, probe_grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from llguidance import LLTokenizer

    from legato.text.guide import Guide
    from legato.text.guide_vocabulary import GuideVocabulary

MAX_CHECKED = 64  # of those used last


class GuideBook:
    """Thread-safe. The vocabulary is loaded with the first guide: whoever serves none does not pay
    for it.

    Each matcher is compiled by itself. llguidance's copies of one would share the states of their
    lexer, and with them the bound on these: one answer's end would depend on others.
    """

    def __init__(
        self,
        load: Callable[[], GuideVocabulary],
        probe: Callable[[str], None] = probe_grammar,
    ) -> None:
        """`load` may take a second. Its ValueError is passed on, each time. `probe` is asked
        before a grammar is compiled in this process.
        """
        self._load = load
        self._vocabulary: GuideVocabulary | None = None
        self._grammars: OrderedDict[Guide, str] = OrderedDict()  # those that were found to be well
        self._lock = threading.Lock()
        self._probe = probe

    def open(
        self,
        guide: Guide,
        *,
        eos_token_ids: Iterable[int],
        stop_token_ids: Iterable[int],
        ignore_eos: bool,
    ) -> GuideMatcher:
        """A matcher at the start of an answer that ends with these tokens. Takes a millisecond as
        a rule, a second at most; a tenth more for a guide that is new here, and a second more the
        first time.

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
            grammar = _checked(guide, vocabulary, self._probe)
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


def _checked(guide: Guide, vocabulary: GuideVocabulary, probe: Callable[[str], None]) -> str:
    """Its grammar, by which at least one token may come first."""
    try:
        grammar = guide.grammar()
        probe(grammar)
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
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=GRAMMAR_LIMITS)
    if matcher.is_error():
        raise ValueError(f"{guide.field}: {reason_of(matcher.get_error())}")
    return matcher
