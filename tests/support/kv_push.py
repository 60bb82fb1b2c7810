"""A sender of KV that says what a test wants it to say, and the prompt whose KV it sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import torch
from fake_engine import VOCAB_SIZE, FakeModel, fake_config
from worker_pair import Attempt, Pair, sampling

from legato.kernels.crc32c import crc32c
from legato.protos import kv_transfer_pb2
from legato.worker.identity import PROTOCOL_VERSION

if TYPE_CHECKING:
    from worker_pair import Worker

    from legato.protos import worker_pb2

Ack = kv_transfer_pb2.KvAck
Push = kv_transfer_pb2.KvPush
Chunk = kv_transfer_pb2.KvChunk
TOKENS = 10
MODEL = FakeModel(fake_config())
PROMPT = [(i * 37 + 5) % VOCAB_SIZE for i in range(TOKENS)]


def begin(worker: Worker, ticket: worker_pb2.KvTicket, **changes: Any) -> Push:  # noqa: ANN401  # fields of the message
    fields: dict[str, Any] = {
        "ticket": ticket,
        "model_fingerprint": "fake",
        "weights": "float32",
        "layout": worker.server.node.identity.kv_layout(),
        "protocol_version": PROTOCOL_VERSION,
        "num_tokens": TOKENS,
    }
    fields.update(changes)
    return Push(begin=kv_transfer_pb2.KvBegin(**fields))


def rows_of(layer: int, start: int, count: int) -> bytes:
    rows = MODEL.rows(torch.tensor(PROMPT), torch.arange(TOKENS))[start : start + count, layer]
    return rows.transpose(0, 1).to(torch.float32).contiguous().numpy().tobytes()


def chunk(ticket: worker_pb2.KvTicket, layer: int, start: int, count: int) -> Chunk:
    data = rows_of(layer, start, count)
    return Chunk(
        epoch=ticket.epoch,
        attempt=ticket.key.attempt,
        layer=layer,
        token_start=start,
        num_tokens=count,
        data=data,
        crc32c=crc32c(data),
    )


def all_chunks(ticket: worker_pb2.KvTicket) -> list[Chunk]:
    return [chunk(ticket, layer, s, c) for layer in range(3) for s, c in ((0, 4), (4, 6))]


def commit(ticket: worker_pb2.KvTicket, num_bytes: int = 3 * TOKENS * 64) -> Push:
    return Push(commit=kv_transfer_pb2.KvCommit(epoch=ticket.epoch, num_bytes=num_bytes))


class Stream:
    """One Push call, a message and its answer at a time."""

    def __init__(self, worker: Worker) -> None:
        self.call: Any = worker.transfer.Push(timeout=20)

    async def ask(self, push: Push) -> Ack:
        await self.call.write(push)
        ack = await self.call.read()
        assert isinstance(ack, Ack), ack
        return ack

    async def ok(self, *pushes: Push) -> None:
        for push in pushes:
            ack = await self.ask(push)
            assert ack.status in (Ack.STATUS_OK, Ack.STATUS_COMMITTED), ack.reason


async def reserved(worker: Worker, request_id: str = "r") -> Attempt:
    attempt = Attempt(Pair(worker, worker), PROMPT, sampling(16), request_id=request_id)
    await attempt.reserve_once()
    return attempt


def blocks_of(worker: Worker, ticket: worker_pb2.KvTicket) -> list[int]:
    found = worker.server.node.tickets.find(ticket.epoch)
    assert found is not None
    assert found.lease is not None
    return list(found.lease.blocks)


async def decoded(attempt: Attempt) -> list[int]:
    """Starts decode with the true first token; returns tokens 2 to 16."""
    attempt.tokens.append(MODEL.expected(PROMPT, 1)[0])
    await attempt.start_decode()
    tokens: list[int] = []
    while True:
        event = await attempt.decode_call.read()
        assert event != grpc.aio.EOF
        tokens += [t.token_id for t in event.tokens.tokens]
        if event.tokens.finished:
            return tokens
