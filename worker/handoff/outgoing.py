"""Outgoing: the frames of one link in the order of their numbers, and their window."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.protos.kv_transfer_pb2 import KvRows
from legato.worker.handoff.frames import header_checksum
from legato.worker.handoff.handoff_error import HandoffError
from legato.worker.handoff.transfer import Control, Piece, Stage
from legato.worker.handoff.turns import Turns
from legato.worker.kv.block_lease import LeaseReleasedError

if TYPE_CHECKING:
    from legato.worker.handoff.lanes import Lane, Packed
    from legato.worker.handoff.transfer import Transfer
    from legato.worker.kv.pager import KvPager

_log = logging.getLogger(__name__)
# So many frames are made before they are sent, no more: who comes later waits for them. While one
# is written, the pager's thread reads the next, and never waits for the event loop.
FRAMES_AHEAD = 2
LAST_SEQUENCE = (1 << 32) - 1


class NumbersUsedUpError(Exception):
    """The link can number no further frame."""


@dataclass(eq=False)
class Frame:
    """Numbered, to be sent now."""

    sequence: int
    transfer: Transfer
    what: Control | Piece
    message: bytes  # until it is sent
    packed: Packed | None = None  # of rows
    sent_at_s: float = 0.0
    bytes_on_way: int = 0  # of rows that were sent and not answered then, its own included


@dataclass(eq=False)
class _RowsFrame:
    """Numbered; its rows are being read."""

    sequence: int
    transfer: Transfer
    piece: Piece
    packing: asyncio.Task[tuple[bytes, Packed]]


class Outgoing:
    """Frames take their numbers in the order in which they are made, which is when something is
    new and there is room: no task of its own makes them. Used on the event loop.
    """

    def __init__(self, pager: KvPager) -> None:
        self._pager = pager
        self._lane: Lane | None = None
        self._turns = Turns()
        self._made: deque[Frame | _RowsFrame] = deque()
        self._packings: set[asyncio.Task[tuple[bytes, Packed]]] = set()
        self._sequence = 0
        self._beat_is_due = False
        self._news = asyncio.Event()
        self._window_bytes = 0  # of chunks from their making to their answer
        self._window_chunks = 0
        self._bytes_on_way = 0  # of chunks from their sending to their answer

    def start(self, lane: Lane) -> None:
        """The receiver has welcomed the link; rows go by `lane`."""
        self._lane = lane
        self._make()

    @property
    def is_empty(self) -> bool:
        """No frame is made and not sent, no rows are unanswered."""
        return not self._made and not self._window_chunks

    def add(self, transfer: Transfer) -> None:
        """Something is new with it."""
        self._turns.add(transfer)
        self._make()

    def beat(self) -> None:
        """Nothing was sent for long: `next` is to return, if it waits."""
        if not self._made:
            self._beat_is_due = True
            self._news.set()

    async def next(self) -> Frame | None:
        """To be sent now; None: a beat.

        Raises:
            NumbersUsedUpError: there is none, and never will be.
        """
        while not self._made:
            if self._beat_is_due:
                self._beat_is_due = False
                return None
            if self._sequence >= LAST_SEQUENCE:
                raise NumbersUsedUpError
            self._news.clear()
            await self._news.wait()
        self._beat_is_due = False
        made = self._made[0]
        frame = made if isinstance(made, Frame) else await self._packed(made)
        self._made.popleft()
        self._make()
        return frame

    def sent(self, frame: Frame) -> None:
        """Its message is given to gRPC now."""
        if frame.packed is not None:
            self._bytes_on_way += frame.packed.num_bytes
            frame.sent_at_s, frame.bytes_on_way = time.monotonic(), self._bytes_on_way

    def answered(self, frame: Frame) -> None:
        """Its slot and its part of the window are free."""
        if isinstance(frame.what, Piece) and frame.packed is not None:
            assert self._lane is not None
            self._bytes_on_way -= frame.packed.num_bytes
            self._lane.answered(frame.bytes_on_way, frame.sent_at_s, time.monotonic())
            self._lane.free(frame.packed)
            self._leave_window(frame.what)
            self._make()

    async def close(self) -> None:
        """Nothing is made any more; returns when the pager's thread is through with the rest."""
        self._lane = None
        for packing in self._packings:
            packing.cancel()
        await asyncio.gather(*self._packings, return_exceptions=True)

    def _room(self, lane: Lane) -> int:
        """Bytes of rows that may be made now: none, or a chunk."""
        if self._window_chunks and (
            self._window_chunks >= lane.window_chunks
            or self._window_bytes + lane.chunk_bytes > lane.window_bytes
        ):
            return 0
        return lane.chunk_bytes

    def _make(self) -> None:
        lane = self._lane
        if lane is None:
            return
        while len(self._made) < FRAMES_AHEAD and self._sequence < LAST_SEQUENCE:
            turn = self._turns.next(self._room(lane), time.monotonic())
            if turn is None:
                break
            transfer, what = turn
            self._sequence += 1
            if isinstance(what, Piece):
                self._made.append(self._rows_frame(lane, transfer, what))
            else:
                self._made.append(_control_frame(transfer, what, self._sequence))
        if self._made or self._sequence >= LAST_SEQUENCE:
            self._news.set()

    def _rows_frame(self, lane: Lane, transfer: Transfer, piece: Piece) -> _RowsFrame:
        rows, progress, ticket = piece.rows, transfer.progress, transfer.ticket
        lease = progress.lease
        assert lease is not None, "there before the first row is"
        header = KvRows(
            epoch=ticket.epoch,
            attempt=ticket.key.attempt,
            layer_start=rows.layer_start,
            num_layers=rows.num_layers,
            token_start=rows.token_start,
            num_tokens=rows.num_tokens,
            kv_head_start=rows.head_start,
            num_kv_heads=rows.num_heads,
            sequence=self._sequence,
        )
        header.header_crc32c = header_checksum(header)
        after = progress.after(rows.layer_end - 1)

        async def fill(into: memoryview, seed: int) -> int:
            return await self._pager.read(lease, rows, into, seed, after)

        self._window_bytes += piece.num_bytes
        self._window_chunks += 1
        packing = asyncio.create_task(lane.pack(header, piece.num_bytes, fill))
        self._packings.add(packing)
        return _RowsFrame(self._sequence, transfer, piece, packing)

    async def _packed(self, made: _RowsFrame) -> Frame:
        """With the message. Where its rows cannot be read, or need not go since its transfer ended
        meanwhile, the frame that gives that up: the number must go.
        """
        transfer, lane = made.transfer, self._lane
        assert lane is not None
        try:
            message, packed = await made.packing
        except LeaseReleasedError:
            transfer.fail(
                HandoffError("the request is over, its blocks are gone", decode_lost=False)
            )
        except Exception as error:
            _log.exception("KV rows cannot be read")
            why = f"KV rows cannot be read: {type(error).__name__}: {error}"
            transfer.fail(HandoffError(why, decode_lost=False))
        else:
            self._packings.discard(made.packing)
            if transfer.stage is Stage.OPEN:
                return Frame(made.sequence, transfer, made.piece, message, packed)
            lane.free(packed)
        self._packings.discard(made.packing)
        self._leave_window(made.piece)
        return _control_frame(transfer, Control.GIVE_UP, made.sequence)

    def _leave_window(self, piece: Piece) -> None:
        self._window_bytes -= piece.num_bytes
        self._window_chunks -= 1


def _control_frame(transfer: Transfer, control: Control, sequence: int) -> Frame:
    message = transfer.take_control(control, sequence).SerializeToString()
    return Frame(sequence, transfer, control, message)
