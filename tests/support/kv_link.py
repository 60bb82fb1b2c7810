"""A Link's sending end that says what a test wants it to say, and a receiver without an engine."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import google_crc32c
import grpc
import torch
from fake_engine import fake_config
from ticket_room import KEY, TicketRoom, ticket_request

from legato.protos import kv_transfer_pb2, worker_pb2
from legato.protos.malformed import RefuseMalformed
from legato.protos.protocol_version import PROTOCOL_VERSION
from legato.worker.channel import CHANNEL_OPTIONS, SERVER_OPTIONS
from legato.worker.handoff.frames import RowsPrefix, header_checksum
from legato.worker.handoff.receiver import KvReceiver
from legato.worker.handoff.transfer_counters import TransferCounters
from legato.worker.identity import Identity
from legato.worker.kv.cache import KvShape
from legato.worker.kv.pager import DamagedChunkError
from legato.worker.services.kv_transfer import KvTransferService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from torch import Tensor

    from legato.worker.handoff.tickets import Ticket
    from legato.worker.kv.block_lease import BlockLease
    from legato.worker.kv.row_range import RowRange

Frame = kv_transfer_pb2.KvFrame
Answer = kv_transfer_pb2.KvAnswer
Receipt = kv_transfer_pb2.KvReceipt
WAIT_S = 20.0
LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE = 3, 2, 4, 4
OK, RESEND = Receipt.STATUS_OK, Receipt.STATUS_RESEND
REFUSED, COMMITTED = Receipt.STATUS_REFUSED, Receipt.STATUS_COMMITTED

TOKENS = 10  # of the prompt that most tests hand over


def message_of(ticket: Ticket, worker_id: str) -> worker_pb2.KvTicket:
    """As the Decode call grants it."""
    key = worker_pb2.AttemptKey(request_id=ticket.key.request_id, attempt=ticket.key.attempt)
    return worker_pb2.KvTicket(
        key=key, epoch=ticket.epoch, worker_id=worker_id, blocks=ticket.num_blocks
    )


def content(num_tokens: int, salt: int = 0) -> Tensor:
    """The KV of a prompt: [LAYERS, 2, num_tokens, HEADS, HEAD_DIM], no two numbers alike."""
    size = (LAYERS, 2, num_tokens, HEADS, HEAD_DIM)
    return torch.arange(torch.Size(size).numel(), dtype=torch.float32).view(size) + 1 + salt / 8


@dataclass
class Rows:
    """Which rows of a content, and what the frame says of them."""

    layers: tuple[int, int]
    tokens: tuple[int, int]
    heads: tuple[int, int] = (0, HEADS)

    def bytes_of(self, kv: Tensor) -> bytes:
        part = kv[slice(*self.layers), :, slice(*self.tokens), slice(*self.heads)].contiguous()
        return part.numpy().tobytes()

    def header(self, ticket: worker_pb2.KvTicket, sequence: int) -> kv_transfer_pb2.KvRows:
        return kv_transfer_pb2.KvRows(
            epoch=ticket.epoch,
            attempt=ticket.key.attempt,
            layer_start=self.layers[0],
            num_layers=self.layers[1] - self.layers[0],
            token_start=self.tokens[0],
            num_tokens=self.tokens[1] - self.tokens[0],
            kv_head_start=self.heads[0],
            num_kv_heads=self.heads[1] - self.heads[0],
            sequence=sequence,
        )


KV = content(TOKENS)
# Each layer in two pieces, but the last in one of each head.
PIECES = [
    Rows((0, 2), (0, 4)),
    Rows((0, 2), (4, 10)),
    Rows((2, 3), (0, 10), (0, 1)),
    Rows((2, 3), (0, 10), (1, 2)),
]
ALL_ROWS = LAYERS * TOKENS


class Link:
    """One Link call, a frame and its answer at a time; beats are skipped."""

    def __init__(
        self, channel: grpc.aio.Channel, identity: Identity, kv_wire: str = "same"
    ) -> None:
        self.call: Any = channel.stream_stream("/legato.v1.KvTransfer/Link")(timeout=WAIT_S)
        self.identity = identity
        self.kv_wire = kv_wire
        self.sequence = 0
        self.num_beats = 0

    def hello_frame(self, **changes: Any) -> Frame:  # noqa: ANN401  # fields of the message
        fields: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "sender_worker_id": "prefill-1",
            "receiver_worker_id": self.identity.worker_id,
            "model_fingerprint": self.identity.model_fingerprint,
            "weights": self.identity.weights,
            "layout": self.identity.kv_layout(),
            "kv_wire": self.kv_wire,
        }
        fields.update(changes)
        return Frame(hello=kv_transfer_pb2.KvHello(**fields))

    async def hello(self, **changes: Any) -> kv_transfer_pb2.KvWelcome:  # noqa: ANN401  # fields of the message
        await self.write(self.hello_frame(**changes).SerializeToString())
        answer = await self.read()
        assert answer.WhichOneof("answer") == "welcome", answer
        return answer.welcome

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def open_bytes(self, ticket: worker_pb2.KvTicket, num_tokens: int) -> bytes:
        frame = kv_transfer_pb2.KvOpen(
            ticket=ticket, num_tokens=num_tokens, sequence=self.next_sequence()
        )
        return Frame(open=frame).SerializeToString()

    def rows_bytes(
        self,
        ticket: worker_pb2.KvTicket,
        rows: Rows,
        kv: Tensor,
        *,
        before: dict[str, Any] | None = None,  # fields of the header, under the checksum
        after: dict[str, Any] | None = None,  # fields changed behind its back
        data: bytes | None = None,  # under the checksum
        damage: int | None = None,  # a byte of the data, behind its back
        wrong_crc: bool = False,
        slot: tuple[int, memoryview] | None = None,
    ) -> bytes:
        header = rows.header(ticket, self.next_sequence())
        for name, value in (before or {}).items():
            setattr(header, name, value)
        data = rows.bytes_of(kv) if data is None else data
        header.header_crc32c = header_checksum(header)
        crc = google_crc32c.extend(header.header_crc32c, data) ^ wrong_crc
        for name, value in (after or {}).items():
            setattr(header, name, value)
        if damage is not None:
            data = data[:damage] + bytes([data[damage] ^ 1]) + data[damage + 1 :]
        if slot is not None:
            slot[1][: len(data)] = data
            header.slot = slot[0]
            header.crc32c = crc
            return Frame(rows=header).SerializeToString()
        prefix = RowsPrefix.of(header, len(data))
        message = bytearray(prefix.num_bytes)
        message[len(prefix.head) :] = data
        prefix.write(memoryview(message), crc)
        return bytes(message)

    def close_bytes(
        self, ticket: worker_pb2.KvTicket, num_rows: int = 0, *, commit: bool = True
    ) -> bytes:
        frame = kv_transfer_pb2.KvClose(
            epoch=ticket.epoch,
            attempt=ticket.key.attempt,
            commit=commit,
            num_rows=num_rows,
            sequence=self.next_sequence(),
        )
        return Frame(close=frame).SerializeToString()

    async def write(self, message: bytes) -> None:
        await self.call.write(message)

    async def read(self) -> Answer:
        while True:
            data = await self.call.read()
            assert data is not grpc.aio.EOF, (await self.call.code(), await self.call.details())
            answer = Answer.FromString(data)
            if answer.WhichOneof("answer") != "beat":
                return answer
            self.num_beats += 1

    async def receipt(self) -> Receipt:
        answer = await self.read()
        assert answer.WhichOneof("answer") == "receipt", answer
        return answer.receipt

    async def ask(self, message: bytes) -> Receipt:
        await self.write(message)
        receipt = await self.receipt()
        assert receipt.sequence == self.sequence
        return receipt

    async def ok(self, *messages: bytes) -> None:
        for message in messages:
            await self.write(message)
        for _ in messages:
            receipt = await self.receipt()
            assert receipt.status in (OK, COMMITTED), receipt

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        """Reads to the end of the call."""
        async with asyncio.timeout(WAIT_S):
            with suppress(grpc.aio.AioRpcError):  # which has the status, too
                while await self.call.read() is not grpc.aio.EOF:
                    pass
            return await self.call.code(), await self.call.details() or ""

    async def cut(self) -> None:
        self.call.cancel()


class FakeWire:
    name = "same"

    def num_bytes(self, rows: RowRange) -> int:
        return rows.num_layers * 2 * rows.num_tokens * rows.num_heads * HEAD_DIM * 4


class FakePager:
    """Pages of float32 on a thread of its own; a test that clears `go` holds it up."""

    def __init__(self, num_blocks: int) -> None:
        slots = num_blocks * BLOCK_SIZE
        self.pages = torch.zeros(LAYERS, 2, slots, HEADS, HEAD_DIM)
        self.go = threading.Event()
        self.go.set()
        self.num_begun = 0
        self._held: list[threading.Event] = []  # of the next writes
        self.wire = FakeWire()
        self._executor = ThreadPoolExecutor(max_workers=1)

    def hold(self, num_writes: int) -> list[threading.Event]:
        """The next writes wait, each for its own event."""
        self._held = [threading.Event() for _ in range(num_writes)]
        return list(self._held)

    async def write(
        self, lease: BlockLease, rows: RowRange, data: memoryview, seed: int, crc: int
    ) -> None:
        go = self._held.pop(0) if self._held else self.go

        def move() -> None:
            assert go.wait(WAIT_S), "the test forgot to let the pager go"
            size = (rows.num_layers, 2, rows.num_tokens, rows.num_heads, HEAD_DIM)
            part = torch.frombuffer(bytearray(data), dtype=torch.float32).view(size)
            heads = slice(rows.head_start, rows.head_start + rows.num_heads)
            with lease.pinned() as blocks:
                for place, token in enumerate(range(rows.token_start, rows.token_end)):
                    slot = blocks[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE
                    layers = slice(rows.layer_start, rows.layer_end)
                    self.pages[layers, :, slot, heads] = part[:, :, place]
            if google_crc32c.extend(seed, bytes(data)) != crc:
                raise DamagedChunkError  # it has landed all the same

        self.num_begun += 1
        moving = asyncio.get_running_loop().run_in_executor(self._executor, move)
        try:
            await asyncio.shield(moving)
        except asyncio.CancelledError:  # one that has begun is waited for, as KvPager does
            await asyncio.wait((moving,))
            raise

    def rows_of(self, blocks: Sequence[int], num_tokens: int) -> Tensor:
        slots = [blocks[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for t in range(num_tokens)]
        return self.pages[:, :, slots]


@dataclass
class Rig:
    """A receiver behind a port."""

    room: TicketRoom
    pager: FakePager
    identity: Identity
    counters: TransferCounters
    channel: grpc.aio.Channel
    kv_wire: str
    address: str
    server: grpc.aio.Server
    service: KvTransferService
    links: list[Link] = field(default_factory=list)

    def link(self) -> Link:
        self.links.append(Link(self.channel, self.identity, self.kv_wire))
        return self.links[-1]

    async def greeted(self, **changes: Any) -> Link:  # noqa: ANN401  # of the hello
        link = self.link()
        await link.hello(**changes)
        return link

    def message(self, ticket: Ticket) -> worker_pb2.KvTicket:
        return message_of(ticket, self.identity.worker_id)

    async def opened(self) -> tuple[Ticket, worker_pb2.KvTicket, Link]:
        """A ticket for TOKENS, and a link on which its transfer is open."""
        ticket = self.room.reserve(ticket_request(TOKENS))
        message, link = self.message(ticket), await self.greeted()
        await link.ok(link.open_bytes(message, TOKENS))
        return ticket, message, link

    def landed(self, ticket: Ticket) -> Tensor:
        assert ticket.lease is not None
        return self.pager.rows_of(ticket.lease.blocks, ticket.num_handoff_tokens)

    async def until(self, condition: Any) -> None:  # noqa: ANN401  # () -> bool
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110  # counters set no event
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running_receiver(
    num_blocks: int = 16,
    *,
    kv_wire: str = "same",
    dtype: torch.dtype = torch.float32,
    shared_memory: bool = True,
    role: str = "decode",
) -> AsyncIterator[Rig]:
    room, pager, counters = TicketRoom.of(num_blocks), FakePager(num_blocks), TransferCounters()
    config = fake_config()
    identity = Identity(
        worker_id="decode-1",
        role=role,  # type: ignore[arg-type]  # tests pass literals
        model_fingerprint="fake",
        weights="float32",
        model=config,
        dtype=torch.float32,
        context_length=512,
        kv_shape=KvShape(LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE, dtype),
        total_blocks=num_blocks,
    )
    pager.wire.name = kv_wire
    receiver = KvReceiver(identity, room.book, pager, counters)  # type: ignore[arg-type]  # a fake
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[RefuseMalformed()])
    service = KvTransferService(identity.role, receiver, shared_memory=shared_memory)
    service.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    try:
        yield Rig(room, pager, identity, counters, channel, kv_wire, address, server, service)
    finally:
        pager.go.set()
        await channel.close()
        await server.stop(0)
        room.check()
        assert KEY.attempt == 0
