"""SentencePiece's BPE: a tokenizer from pieces, their scores and their types."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from legato.protos.printable import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

SPACE = "\u2581"  # SentencePiece's visible space
# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


def sentencepiece_bpe(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    add_space_prefix: bool,
) -> Tokenizer:
    """The tokenizer; a piece's place is its id. The three sequences are of one length.

    SentencePiece merges two neighbours where they make up a piece, the best score first, the
    leftmost of equals. A BPE model does the same if it may make each piece of any two halves, and
    ranks the pairs by the score of what they make. The pairs that make one piece then differ in
    rank where SentencePiece sees one score; that would matter where they overlap, and no text was
    found where they do. Equal scores are taken for runs of one character only (Llama 2's runs of
    spaces all have -1e9): the longest first, they come out the same. Tests compare with the plain
    algorithm.

    `add_space_prefix` puts a space before text, at the start and behind every added token, and
    takes one off the start of decoded text.

    Raises:
        ValueError: for pieces that leave open how text is merged.
    """
    # The text of a piece that the user defined is matched before spaces become visible.
    texts = [
        text.replace(SPACE, " ") if kind == USER_DEFINED else text
        for text, kind in zip(pieces, types, strict=True)
    ]
    vocabulary = {text: index for index, text in enumerate(texts)}
    if len(vocabulary) != len(texts):
        twice = next(text for index, text in enumerate(texts) if vocabulary[text] != index)
        raise ValueError(f"tokenizer.ggml.tokens has {shown(twice)} twice")
    unknown = [text for text, kind in zip(texts, types, strict=True) if kind == UNKNOWN]
    if len(unknown) > 1:
        raise ValueError(f"tokenizer.ggml.token_type calls {len(unknown)} tokens unknown, not 1")
    has_bytes = _check_bytes(texts, types)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(texts, scores, types),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if add_space_prefix else replace
    )
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_tokens(
        [
            AddedToken(text, special=kind != USER_DEFINED, normalized=False)
            for text, kind in zip(texts, types, strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    return tokenizer


def _merges(
    texts: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """All pairs that make a piece, the best first, of equals the longest."""
    known = {text for text, kind in zip(texts, types, strict=True) if kind in (NORMAL, UNUSED)}
    made: list[tuple[float, str, list[tuple[str, str]]]] = []
    for text, score, kind in zip(texts, scores, types, strict=True):
        if kind not in (NORMAL, UNUSED):
            continue
        halves = [
            (text[:size], text[size:])
            for size in range(1, len(text))
            if text[:size] in known and text[size:] in known
        ]
        if not halves:
            continue
        if kind == UNUSED:
            raise ValueError(
                f"tokenizer.ggml.token_type calls {shown(text)} unused, though it can be merged:"
                " not supported"
            )
        if not math.isfinite(score):
            raise ValueError(f"tokenizer.ggml.scores has {score} for {shown(text)}")
        made.append((-score, text, halves))
    made.sort(key=lambda entry: (entry[0], -len(entry[1])))
    for (score, text, _), (next_score, next_text, _) in pairwise(made):
        if score == next_score and len({*text, *next_text}) > 1:
            raise ValueError(
                f"tokenizer.ggml.scores has {-score:g} for both {shown(text)} and"
                f" {shown(next_text)}: which one is merged first is open"
            )
    return [pair for _, _, halves in made for pair in halves]


def _check_bytes(texts: Sequence[str], types: Sequence[int]) -> bool:
    """Whether there are byte pieces; all of them, or none."""
    found = {text for text, kind in zip(texts, types, strict=True) if kind == BYTE}
    odd = next((text for text in found if not _BYTE_PIECE.fullmatch(text)), None)
    if odd is not None:
        raise ValueError(
            f"tokenizer.ggml.tokens has {shown(odd)} as a byte, not of the form <0x0A>"
        )
    if found and len(found) != 256:
        raise ValueError(f"tokenizer.ggml.token_type calls {len(found)} tokens bytes, not 256 or 0")
    return bool(found)
