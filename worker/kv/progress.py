"""KvProgress: which rows of one sequence's KV are in the pages by now, layer by layer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.worker.kv.block_lease import BlockLease
    from legato.worker.layer_reports import LayerReports


@dataclass(frozen=True)
class _StepRows:
    """Rows that are there once a step under way has come to them."""

    num_tokens: int
    reports: LayerReports | None  # None: when it has ended


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
        # Rows in all layers, and the steps under way in order. Replaced as a whole by the engine's
        # thread, so that others see one state.
        self._state: tuple[int, tuple[_StepRows, ...]] = (0, ())
        self._told = [0]

    @classmethod
    def complete(cls, lease: BlockLease, num_layers: int, num_tokens: int) -> KvProgress:
        """Of a sequence that is computed."""
        progress = cls(num_layers, num_tokens)
        progress.lease = lease
        progress._state = (num_tokens, ())
        progress.confirm()
        return progress

    # Called on the event loop.

    def available(self, layer: int) -> int:
        """So many first tokens have their K and V of that layer in the pages; on a device, once
        `after(layer)`, asked for afterwards, is over.
        """
        computed, steps = self._state
        for rows in steps:
            if rows.reports is None or layer >= rows.reports.num_done:
                break
            computed += rows.num_tokens
        return computed

    def after(self, layer: int) -> object | None:
        """What a device's stream must wait for before it reads that layer's available rows."""
        event = None
        for rows in self._state[1]:
            if rows.reports is None or layer >= rows.reports.num_done:
                break
            event = rows.reports.after(layer)
        return event

    async def changed(self) -> None:
        """Waits until something is new since the last return."""
        await self._changed.wait()
        self._changed.clear()

    def confirm(self) -> None:
        """The rows are good, and an answer goes on from them: the call that owns the sequence says
        so once the first token is known.
        """
        self._confirmed.set()

    async def confirmed(self) -> None:
        """Waits for that word. Rows may be sent without it, and must not be committed."""
        await self._confirmed.wait()

    def tell(self) -> None:
        """Ends the wait of `changed` if something is new since it was last told."""
        computed, steps = self._state
        now = [computed, *(rows.reports.num_done for rows in steps if rows.reports is not None)]
        if now != self._told:
            self._told = now
            self._changed.set()

    # Called on the engine's thread.

    def begin(self, num_tokens: int, reports: LayerReports | None) -> None:
        """A step begins that computes the next rows, or a step under way is found to do so."""
        computed, steps = self._state
        self._state = (computed, (*steps, _StepRows(num_tokens, reports)))

    def end(self) -> None:
        """Of the steps that began, the first has ended."""
        computed, (first, *others) = self._state
        self._state = (computed + first.num_tokens, tuple(others))

    def found(self, num_tokens: int) -> None:
        """These first rows were in the pages before any step."""
        assert self._state == (0, ()), "rows are found before the first is computed"
        self._state = (num_tokens, ())
