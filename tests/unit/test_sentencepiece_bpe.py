"""SentencePiece's BPE: the same pieces as the plain algorithm, and what is refused."""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING

import pytest

from legato.text.sentencepiece_bpe import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    sentencepiece_bpe,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def merged(text: str, scores: Mapping[str, float]) -> list[str]:
    """The algorithm as SentencePiece defines it: the best pair first, the leftmost of equals."""
    symbols = list(text)
    before = list(range(-1, len(symbols) - 1))
    after = [*range(1, len(symbols)), -1]
    agenda: list[tuple[float, int, int, int]] = []

    def consider(left: int, right: int) -> None:
        if left >= 0 and right >= 0 and symbols[left] + symbols[right] in scores:
            whole = symbols[left] + symbols[right]
            heapq.heappush(agenda, (-scores[whole], left, right, len(whole)))

    for index in range(len(symbols) - 1):
        consider(index, index + 1)
    while agenda:
        _, left, right, size = heapq.heappop(agenda)
        if not symbols[left] or not symbols[right]:
            continue
        if after[left] != right or len(symbols[left]) + len(symbols[right]) != size:
            continue
        symbols[left] += symbols[right]
        symbols[right] = ""
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        consider(before[left], left)
        consider(left, after[left])
    return [symbol for symbol in symbols if symbol]


def build(scores: Mapping[str, float], *, add_space_prefix: bool = False) -> Tokenizer:
    return sentencepiece_bpe(
        list(scores), list(scores.values()), [NORMAL] * len(scores),
        add_space_prefix=add_space_prefix,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_any_vocabulary_merges_as_the_plain_algorithm_does(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(250):
        alphabet = "ab" if chance.random() < 0.6 else "abc"
        pieces = set(alphabet)
        for _ in range(chance.randint(3, 40)):
            known = sorted(pieces)
            grown = chance.choice(known) + chance.choice(known)
            pieces.add(grown if seed % 2 else "".join(chance.choices(alphabet, k=len(grown) + 1)))
        order = sorted(pieces)
        chance.shuffle(order)
        if chance.random() < 0.5:
            order.sort(key=len)  # as training finds them
        scores = {piece: float(-index) for index, piece in enumerate(order)}
        tokenizer = build(scores)
        for _ in range(20):
            text = "".join(chance.choices(alphabet, k=chance.randint(1, 60)))
            assert tokenizer.encode(text).tokens == merged(text, scores), order


def test_runs_of_spaces_with_one_score() -> None:
    for bits in range(1, 1 << 9):
        lengths = [size + 2 for size in range(9) if bits >> size & 1]
        scores = {"▁": 0.0} | {"▁" * size: -1e9 for size in lengths}
        tokenizer = build(scores)
        for size in range(1, 36):
            assert tokenizer.encode(" " * size).tokens == merged("▁" * size, scores), lengths


def test_runs_of_one_score_among_other_pieces() -> None:
    chance = random.Random(1)
    for _ in range(600):
        others = {"".join(chance.choices("▁ab-", k=chance.randint(2, 5))) for _ in range(8)}
        order = sorted(piece for piece in others if len(set(piece)) > 1)
        chance.shuffle(order)
        scores = dict.fromkeys("▁ab-", 0.0) | {p: -1.0 - i for i, p in enumerate(order)}
        equal = chance.choice([-1e9, -1.5])
        lengths = chance.sample(range(2, 12), chance.randint(1, 9))
        scores |= {"▁" * size: equal for size in lengths}
        tokenizer = build(scores)
        for _ in range(20):
            pieces = ["▁", "▁▁", "▁▁▁▁▁", "-", "---", "a", "b"]
            text = "".join(chance.choices(pieces, k=chance.randint(1, 12)))
            assert tokenizer.encode(text).tokens == merged(text, scores), scores


def test_bytes_stand_in_for_unknown_characters_and_are_never_merged() -> None:
    pieces = ["<unk>", *BYTES, "▁", "a", "<", "0", "x", "4", "1", ">", "<0", "<0x", "<0x4", "1>"]
    types = [UNKNOWN] + [BYTE] * 256 + [NORMAL] * (len(pieces) - 257)
    scores = [float(-index) for index in range(len(pieces))]
    tokenizer = sentencepiece_bpe(pieces, scores, types, add_space_prefix=True)
    tokens = tokenizer.encode("a🦊").tokens
    assert tokens == ["▁", "a", "<0xF0>", "<0x9F>", "<0xA6>", "<0x8A>"]
    assert "<0x41>" not in tokenizer.encode("<0x41>").tokens
    assert tokenizer.decode(tokenizer.encode("a🦊").ids) == "a🦊"


def test_without_bytes_unknown_characters_together_are_one_unknown_token() -> None:
    pieces = ["<unk>", "▁", "a"]
    tokenizer = sentencepiece_bpe(
        pieces, [0.0, -1.0, -2.0], [UNKNOWN, NORMAL, NORMAL], add_space_prefix=False
    )
    assert tokenizer.encode("a🦊🦊a").tokens == ["a", "<unk>", "a"]


def test_pieces_that_the_user_defined_are_cut_out_first() -> None:
    pieces = ["<s>", "▁", "a", "▁▁", "▁▁▁", "<t>", "a<", "t", ">", "▁a"]
    types = [CONTROL, NORMAL, NORMAL, *[USER_DEFINED] * 3, *[NORMAL] * 4]
    scores = [float(-index) for index in range(len(pieces))]
    tokenizer = sentencepiece_bpe(pieces, scores, types, add_space_prefix=False)
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("a<t>a").ids == [2, 5, 2]
    assert tokenizer.encode("a    a  a").ids == [2, 4, 9, 3, 2]  # the longest, from the left
    assert tokenizer.decode([2, 4, 9, 3, 2]) == "a    a  a"


@pytest.mark.parametrize(
    ("pieces", "scores", "types", "words"),
    [
        (["a", "b", "ab", "ba"], [0, 0, -1, -1], [1] * 4, "-1 for both 'ab' and 'ba'"),
        (["a", "b", "ab", "ba"], [-1000] * 4, [1] * 4, "which one is merged first is open"),
        (["a", "b", "aa", "bb"], [0, -1, -2, -2], [1] * 4, "-2 for both 'aa' and 'bb'"),
        (["a", "b", "ab"], [0, 0, float("nan")], [1] * 3, "nan for 'ab'"),
        (["a", "b", "ab"], [0, -1, -2], [1, 1, UNUSED], "'ab' unused"),
        (["a", "a"], [0, -1], [1, 1], "'a' twice"),
        ([" ", "▁"], [0, -1], [1, USER_DEFINED], "' ' twice"),
        (["a", "b"], [0, -1], [UNKNOWN, UNKNOWN], "2 tokens unknown"),
        (["<0x0a>"], [0], [BYTE], "not of the form <0x0A>"),
        (["<0x0A>", "a"], [0, 0], [BYTE, NORMAL], "1 tokens bytes, not 256 or 0"),
    ],
)
def test_what_leaves_merging_open_is_refused(
    pieces: list[str], scores: list[float], types: list[int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        sentencepiece_bpe(pieces, scores, types, add_space_prefix=False)


def test_pieces_that_are_padding_do_no_harm() -> None:
    tokenizer = sentencepiece_bpe(
        ["a", "b", "ab", "[PAD3]", "[PAD4]"], [0, -1, -2, -1000, -1000], [1, 1, 1, 5, 5],
        add_space_prefix=False,
    )  # fmt: skip
    assert tokenizer.encode("abab").ids == [2, 2]
