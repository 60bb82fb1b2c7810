"""PrefixHasher: one prefix has one name, and whatever KV depends on changes it."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.protos.prefix_hash import PrefixHasher

INT32 = st.integers(-(2**31), 2**31 - 1)


def hasher(
    fingerprint: str = "f", block_size: int = 4, salt: str = "", kv_kind: str = "bf16"
) -> PrefixHasher:
    return PrefixHasher(fingerprint, block_size, salt, kv_kind=kv_kind)


def by_hand(fingerprint: str, block_size: int, salt: str, kind: str, ids: list[int]) -> list[bytes]:
    """The definition, said once more without a loop over bytes."""
    fields = [s.encode() for s in (fingerprint, kind, str(block_size), salt)]
    root = b"".join(struct.pack("<Q", len(f)) + f for f in fields)
    hashes = [hashlib.blake2b(root, digest_size=16, person=b"legato-kv-root").digest()]
    for i in range(len(ids) // block_size):
        block = ids[i * block_size : (i + 1) * block_size]
        data = hashes[-1] + struct.pack(f"<{block_size}i", *block)
        hashes.append(hashlib.blake2b(data, digest_size=16).digest())
    return hashes[1:]


@settings(deadline=None)
@given(st.text(), st.integers(1, 5), st.text(), st.text(), st.lists(INT32, max_size=20))
def test_the_chain_is_what_its_definition_says(
    fingerprint: str, block_size: int, salt: str, kind: str, ids: list[int]
) -> None:
    ours = PrefixHasher(fingerprint, block_size, salt, kv_kind=kind)
    assert ours.block_hashes(ids) == by_hand(fingerprint, block_size, salt, kind, ids)


def test_only_full_blocks_have_a_hash_of_16_bytes() -> None:
    ours = hasher()
    assert [len(ours.block_hashes([7] * n)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert {len(h) for h in ours.block_hashes([7] * 8)} == {16}


def test_a_token_changes_its_block_and_all_after_it_and_none_before() -> None:
    ids = list(range(16))
    changed = [*ids[:5], 99, *ids[6:]]
    same = [a == b for a, b in zip(*map(hasher().block_hashes, (ids, changed)), strict=True)]
    assert same == [True, False, False, False]


def test_equal_blocks_at_different_places_have_different_hashes() -> None:
    assert len(set(hasher().block_hashes([1] * 40))) == 10


def test_model_form_block_size_and_salt_each_make_another_root() -> None:
    others = [
        hasher(),
        hasher(fingerprint="g"),
        hasher(salt="tenant"),
        hasher(kv_kind="int8"),
        hasher(block_size=8),
        hasher(fingerprint="fb", kv_kind="f16"),  # the same letters, cut elsewhere
        hasher(fingerprint="", salt="f"),
        hasher(fingerprint="", kv_kind="fbf16"),
    ]
    firsts = [other.block_hashes(list(range(8)))[0] for other in others]
    assert len(set(firsts)) == len(others)


@settings(deadline=None)
@given(st.lists(INT32, max_size=30), st.lists(st.integers(0, 30), max_size=6))
def test_a_growing_sequence_has_the_hashes_of_the_whole(ids: list[int], cuts: list[int]) -> None:
    ours = hasher()
    hashes: list[bytes] = []
    for cut in sorted(min(cut, len(ids)) for cut in [*cuts, len(ids)]):
        ours.extend(hashes, ids[:cut])
        assert hashes == ours.block_hashes(ids[:cut])


def test_extend_reads_only_the_new_full_blocks() -> None:
    read: list[slice] = []

    class Tokens(list[int]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204  # overloads of list
            read.append(index)
            return super().__getitem__(index)

    ours = hasher()
    hashes = ours.block_hashes(list(range(8)))
    ours.extend(hashes, Tokens(range(11)))
    assert read == []
    ours.extend(hashes, Tokens(range(14)))
    assert read == [slice(8, 12)]
    assert hashes == ours.block_hashes(list(range(14)))


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        hasher(block_size=0)
    for wrong in (2**31, -(2**31) - 1):
        with pytest.raises(ValueError, match="a token id is not an int32"):
            hasher().block_hashes([1, 2, 3, wrong])
    ours = hasher()
    hashes = ours.block_hashes(list(range(8)))
    with pytest.raises(ValueError, match="7 token_ids fill 1 blocks, got 2 hashes"):
        ours.extend(hashes, list(range(7)))
