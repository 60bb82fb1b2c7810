"""PrefixHasher: the names under which full KV blocks are found again."""

from __future__ import annotations

import sys
from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HASH_BYTES = 16  # 128 bits: two different prefixes share a name with a chance of 2^-64 in 2^32


class PrefixHasher:
    """A block's hash covers all that its KV depends on: every token up to its end, and the root.

    The root covers the model, what KV is stored as, the block size and the salt, so that two
    models, two forms or two tenants with salts of their own never share a block. A block's hash is
    BLAKE2b-128 of the hash before it and the block's token ids (int32, little endian). Each input
    has one length only, or stands behind its length: no two spell the same bytes.
    """

    def __init__(
        self, model_fingerprint: str, block_size: int, cache_salt: str = "", *, kv_kind: str
    ) -> None:
        """`kv_kind`: the form of weights and KV, as "keep+bfloat16/int8": other bits, other KV."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self._block_size = block_size
        # `person` keeps the root apart from the chain: no token ids can spell another root.
        root = blake2b(digest_size=HASH_BYTES, person=b"legato-kv-root")
        for field in (model_fingerprint, kv_kind, str(block_size), cache_salt):
            data = field.encode()
            root.update(len(data).to_bytes(8, "little"))
            root.update(data)
        self._root = root.digest()

    def block_hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        """One hash for each full block; the tokens of a last, partial one have none.

        Raises:
            ValueError: a token id is not an int32.
        """
        hashes: list[bytes] = []
        self.extend(hashes, token_ids)
        return hashes

    def extend(self, hashes: list[bytes], token_ids: Sequence[int]) -> None:
        """Appends to `hashes`, those of the first blocks of `token_ids`, what has become full.

        Raises:
            ValueError: a token id is not an int32, or there are more hashes than full blocks.
        """
        size = self._block_size
        num_full = len(token_ids) // size
        if len(hashes) > num_full:
            raise ValueError(
                f"{len(token_ids)} token_ids fill {num_full} blocks, got {len(hashes)} hashes"
            )
        if len(hashes) == num_full:
            return
        data = _int32_bytes(token_ids[len(hashes) * size : num_full * size])
        last = hashes[-1] if hashes else self._root
        for start in range(0, len(data), 4 * size):
            last = blake2b(last + data[start : start + 4 * size], digest_size=HASH_BYTES).digest()
            hashes.append(last)


def _int32_bytes(token_ids: Sequence[int]) -> bytes:
    try:
        ids = array("i", token_ids)
    except OverflowError as error:
        raise ValueError("a token id is not an int32") from error
    assert ids.itemsize == 4
    if sys.byteorder != "little":
        ids.byteswap()
    return ids.tobytes()
