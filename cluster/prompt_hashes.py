"""PromptHashes: one prompt's blocks by the names under which workers find them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.protos.prefix_hash import PrefixHasher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.protos import worker_pb2

SHORT_BYTES = 8  # as in PrefixChanges


class PromptHashes:
    """Computed when first asked for, once for all workers whose blocks have the same names."""

    def __init__(self, token_ids: Sequence[int], cache_salt: str) -> None:
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self._of_kind: dict[tuple[str, int, str], list[int]] = {}

    def of(self, identity: worker_pb2.WorkerIdentity) -> list[int]:
        """Each full block's, in the order of the prompt."""
        layout = identity.kv_layout
        kind = (identity.model_fingerprint, layout.block_size, f"{identity.weights}/{layout.dtype}")
        hashes = self._of_kind.get(kind)
        if hashes is None:
            hasher = PrefixHasher(kind[0], kind[1], self._cache_salt, kv_kind=kind[2])
            named = hasher.block_hashes(self._token_ids)
            hashes = [int.from_bytes(name[:SHORT_BYTES], "little") for name in named]
            self._of_kind[kind] = hashes
        return hashes
