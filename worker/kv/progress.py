"""KvProgress: which rows of one sequence's KV are in the pages by now, layer by layer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.worker.kv.block_lease import BlockLease


class KvProgress:
    """Told by the engine's thread, asked and waited for on the event loop.

    Rows never go away: `available` only grows. While a step runs, layers that it is through with
    have its rows already.
    """

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        """`num_tokens`: rows in each layer once all is computed."""
        self.num_layers = num_layers
        self.num_tokens = num_tokens
        self.lease: BlockLease | None = None  # there before the first row is
        self._changed = asyncio.Event()
        self._confirmed = asyncio.Event()
        self._computed = 0  # in all layers

    @classmethod
    def complete(cls, lease: BlockLease, num_layers: int, num_tokens: int) -> KvProgress:
        """Of a sequence that is computed."""
        progress = cls(num_layers, num_tokens)
        progress.lease, progress._computed = lease, num_tokens
        progress.confirm()
        return progress

    def available(self, layer: int) -> int:
        """So many first tokens have their K and V of that layer in the pages."""
        return self._computed

    def after(self, layer: int) -> object | None:
        """What a reader of that layer's rows must wait for on its device; None: nothing."""
        return None

    async def changed(self) -> None:
        """Waits until something is new since the last return."""
        await self._changed.wait()
        self._changed.clear()

    def finish(self, lease: BlockLease) -> None:
        """All is computed."""
        self.lease, self._computed = lease, self.num_tokens
        self._changed.set()

    def confirm(self) -> None:
        """The rows are good, and an answer goes on from them: the call that owns the sequence says
        so once the first token is known.
        """
        self._confirmed.set()

    async def confirmed(self) -> None:
        """Waits for that word. Rows may be sent without it, and must not be committed."""
        await self._confirmed.wait()
