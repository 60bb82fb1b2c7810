"""rows_digest: a name for the bits of a sequence's rows, wherever they lie."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.worker.kv.cache import KvCache


def rows_digest(cache: KvCache, blocks: Sequence[int], num_tokens: int) -> str:
    """Of K and V of the first tokens in all layers, read without anything of the hand-off."""
    size = cache.shape.block_size
    positions = torch.arange(num_tokens)
    slots = torch.tensor(blocks)[positions // size] * size + positions % size
    digest = hashlib.blake2b(digest_size=16)
    for layer in cache.layers:
        for rows in (layer.k, layer.v):
            digest.update(rows[slots].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
