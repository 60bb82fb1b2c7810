"""Transfer: what of one sequence's KV was sent, is under way, and is sent next."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from legato.protos.kv_transfer_pb2 import KvClose, KvFrame, KvOpen
from legato.worker.handoff.handoff_error import HandoffError
from legato.worker.kv.row_range import RowRange

if TYPE_CHECKING:
    from legato.protos.kv_transfer_pb2 import KvReceipt
    from legato.protos.worker_pb2 import KvTicket
    from legato.worker.kv.progress import KvProgress

MAX_SENDS_PER_CHUNK = 4
# A receiver that was lost may come back for so long; then the KV goes to another one.
PATIENCE_S = 5.0
# One to which there never was a connection, for each is refused at once. The router notices within
# that time where the reason is that the receiver is dead.
UNREACHABLE_PATIENCE_S = 2.0


class Stage(Enum):
    """Of a transfer on its link."""

    TO_OPEN = auto()
    OPENING = auto()  # Open was sent
    OPEN = auto()  # rows may be sent
    COMMITTING = auto()  # Close with `commit` was sent
    TO_GIVE_UP = auto()  # the receiver is still to be told
    OVER = auto()


class Control(Enum):
    """Frames of a transfer besides its rows."""

    OPEN = auto()
    COMMIT = auto()
    GIVE_UP = auto()


@dataclass(eq=False)
class Piece:
    """Rows of one frame."""

    rows: RowRange
    num_bytes: int
    num_sends: int = 0


@dataclass(frozen=True)
class RowSize:
    """Of one token in one layer."""

    num_bytes: int  # on the wire
    num_kv_heads: int


class Transfer:
    """Of one ticket, on one link at a time. No I/O; used on the event loop."""

    def __init__(self, progress: KvProgress, ticket: KvTicket, size: RowSize) -> None:
        self.progress = progress
        self.ticket = ticket
        self.is_confirmed = False  # else rows are sent, and not committed
        self.stage = Stage.OVER
        self.was_open = False
        self.reused_tokens = 0
        self._size = size
        self._ended: asyncio.Future[None] | None = None
        # Each layer's rows are sent from the first token on, those that came damaged once more.
        self._sent = [0] * progress.num_layers
        self._again: deque[Piece] = deque()
        self._num_unanswered = 0  # pieces
        self._is_cut_off = False  # the link broke, and nothing has landed since
        self._is_refused_only = True  # each link so far ended before there was a connection
        self._waits_since_s: float | None = None  # for the receiver

    @property
    def num_rows(self) -> int:
        """That are to be sent: of each layer, each counted once."""
        return (self.progress.num_tokens - self.reused_tokens) * self.progress.num_layers

    @property
    def num_bytes(self) -> int:
        """Of these rows on the wire."""
        return self.num_rows * self._size.num_bytes

    @property
    def has_ended(self) -> bool:
        """On its link; frames that are still under way do not count."""
        return self._ended is None or self._ended.done()

    # Its life on a link.

    def attach(self, now_s: float) -> asyncio.Future[None]:
        """It is on a new link, to be opened. The future ends when it is over there."""
        self.stage = Stage.TO_OPEN
        self._sent = [0] * self.progress.num_layers
        self._again.clear()
        self._num_unanswered = 0
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def fail(self, error: Exception) -> None:
        """This side ends it; the receiver is to be told if it knows of it."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
        self.give_up()

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        known = self.stage in (Stage.OPENING, Stage.OPEN)
        # Not after the commit was sent: nothing comes behind it.
        if self.stage is not Stage.TO_GIVE_UP:
            self.stage = Stage.TO_GIVE_UP if known else Stage.OVER

    def refused(self, reason: str, address: str) -> None:
        """The receiver has ended it."""
        self.stage = Stage.OVER
        self.fail(
            HandoffError(
                f"decode worker at {address} refused the KV: {reason}",
                decode_lost=True,
                refused=True,
            )
        )

    def committed(self) -> None:
        """The receiver has it."""
        self.stage = Stage.OVER
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def link_broke(self, error: Exception, now_s: float, *, unreachable: bool) -> None:
        """No frame of it is under way any more; it may be attached again. `unreachable`: there was
        no connection.
        """
        if self.stage is Stage.OPEN and not self._num_unanswered and self._first_rows() is None:
            self._waits_since_s = None  # it waited for the computation
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        self._is_cut_off = True
        self._is_refused_only = self._is_refused_only and unreachable
        self.stage = Stage.OVER
        self.fail(error)

    @property
    def lost_at_s(self) -> float | None:
        """When it is given up, where nothing comes of it until then; None: its link is there."""
        if not self._is_cut_off or self._waits_since_s is None:
            return None
        patience_s = UNREACHABLE_PATIENCE_S if self._is_refused_only else PATIENCE_S
        return self._waits_since_s + patience_s

    def is_lost(self, now_s: float) -> bool:
        """Its link broke, and for as long as it is patient nothing has come of another one."""
        return self.lost_at_s is not None and now_s >= self.lost_at_s

    # What is to be sent.

    def control(self) -> Control | None:
        """The frame that is due, besides rows."""
        match self.stage:
            case Stage.TO_OPEN:
                return Control.OPEN
            case Stage.TO_GIVE_UP:
                return Control.GIVE_UP
            case Stage.OPEN if self._is_complete():
                return Control.COMMIT
        return None

    def take_control(self, control: Control, sequence: int) -> KvFrame:
        """The frame; it is sent now."""
        ticket = self.ticket
        if control is Control.OPEN:
            self.stage = Stage.OPENING
            return KvFrame(
                open=KvOpen(ticket=ticket, num_tokens=self.progress.num_tokens, sequence=sequence)
            )
        commit = control is Control.COMMIT
        self.stage = Stage.COMMITTING if commit else Stage.OVER
        return KvFrame(
            close=KvClose(
                epoch=ticket.epoch,
                attempt=ticket.key.attempt,
                commit=commit,
                num_rows=self.num_rows if commit else 0,
                sequence=sequence,
            )
        )

    def take_piece(self, now_s: float, most_bytes: int) -> Piece | None:
        """Rows to be sent now, of so many bytes at most if that is a row; None: there are none at
        present.
        """
        if self.stage is not Stage.OPEN:
            return None
        if self._again:
            piece = self._again.popleft()
        else:
            rows = self._next_rows(max(1, most_bytes // self._size.num_bytes))
            if rows is None:
                return None
            for layer in range(rows.layer_start, rows.layer_end):
                self._sent[layer] = rows.token_end
            num_rows = rows.num_layers * rows.num_tokens
            piece = Piece(rows, num_rows * self._size.num_bytes)
        if not self._num_unanswered and not self._is_cut_off:
            self._waits_since_s = now_s
        piece.num_sends += 1
        self._num_unanswered += 1
        return piece

    # The receiver's answers.

    def opened(self, receipt: KvReceipt, now_s: float) -> None:
        """Raises HandoffError where the answer makes no sense."""
        landed, reused = list(receipt.landed_tokens), receipt.reused_tokens
        num_layers, num_tokens = self.progress.num_layers, self.progress.num_tokens
        if len(landed) != num_layers or not all(0 <= n <= num_tokens for n in landed):
            raise HandoffError(
                f"the receiver's landed_tokens are {landed}, expected {num_layers} numbers in "
                f"[0, {num_tokens}]",
                decode_lost=True,
                refused=True,
            )
        if not 0 <= reused <= min(landed):
            raise HandoffError(
                f"the receiver's reused_tokens is {reused}, limit [0, {min(landed)}] (of those "
                "that have landed)",
                decode_lost=True,
                refused=True,
            )
        self.stage = Stage.OPEN
        self.was_open = True
        self._sent, self.reused_tokens = landed, reused
        if self._first_rows() is None:
            self._has_advanced(now_s)

    def landed(self, now_s: float) -> None:
        """A piece is in the receiver's pages."""
        self._num_unanswered -= 1
        self._has_advanced(now_s)

    def damaged(self, piece: Piece) -> None:
        """It is to be sent again. Raises HandoffError if that was too often."""
        self._num_unanswered -= 1
        if piece.num_sends >= MAX_SENDS_PER_CHUNK:
            raise HandoffError(
                f"rows from layer {piece.rows.layer_start}, token {piece.rows.token_start} arrived "
                f"damaged {piece.num_sends} times",
                decode_lost=True,
            )
        self._again.append(piece)

    def _has_advanced(self, now_s: float) -> None:
        self._waits_since_s = now_s
        self._is_cut_off = False

    def _is_complete(self) -> bool:
        all_sent = min(self._sent) >= self.progress.num_tokens
        return all_sent and not self._num_unanswered and not self._again and self.is_confirmed

    def _first_rows(self) -> tuple[int, int, int] | None:
        """The first layer that has any to be sent, its first token, and how many."""
        for layer in range(self.progress.num_layers):
            start = self._sent[layer]
            num_tokens = self.progress.available(layer) - start
            if num_tokens > 0:
                return layer, start, num_tokens
        return None

    def _next_rows(self, most_rows: int) -> RowRange | None:
        """Of the first layer that has any, and of those behind it as far as they fit."""
        found = self._first_rows()
        if found is None:
            return None
        first, start, num_tokens = found
        available, end = self.progress.available, self.progress.num_layers
        alike = 1  # layers whose rows from `start` on are there, as far as the first one's
        while (
            first + alike < end
            and self._sent[first + alike] == start
            and available(first + alike) >= start + num_tokens
        ):
            alike += 1
        num_layers, num_tokens = _cut(alike, num_tokens, most_rows)
        return RowRange(first, num_layers, start, num_tokens, 0, self._size.num_kv_heads)


def _cut(num_layers: int, num_tokens: int, most_rows: int) -> tuple[int, int]:
    """Layers and tokens of the next frame, such that those rows take few frames: the fewest layers
    with which they take a tenth more than they would if all were full, else those with which they
    take the fewest. Tokens in equal parts: the last one is no crumb.
    """
    least = -(-num_layers * num_tokens // most_rows)
    best = (0, 0, 0)
    for layers in range(1, min(num_layers, most_rows) + 1):
        parts = -(-num_tokens // (most_rows // layers))
        frames = parts * -(-num_layers // layers)
        if layers == 1 or frames < best[0]:
            best = (frames, layers, -(-num_tokens // parts))
        if 10 * frames <= 11 * least:
            break
    return best[1], best[2]
