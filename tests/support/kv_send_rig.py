"""Rig: a KvSender with its pager, and a receiver that misbehaves at a chosen frame."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from link_receiver import (
    HEAD_DIM,
    HEADS,
    WORKER_ID,
    ArrayMemory,
    ArrayPager,
    LinkReceiver,
)

from legato.protos.worker_pb2 import AttemptKey, KvTicket
from legato.worker.handoff.sender import HandoffResult, KvSender
from legato.worker.handoff.transfer_counters import TransferCounters
from legato.worker.identity import Identity
from legato.worker.kv.cache import KvShape
from legato.worker.kv.progress import KvProgress
from legato.worker.kv.wire import WireFormat

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from legato.worker.kv.block_lease import BlockLease

LAYERS = 3
SHAPE = KvShape(LAYERS, HEADS, HEAD_DIM, 16, torch.float32)
MEMORY = pytest.mark.parametrize("memory", [False, True], ids=["grpc", "memory"])


class StepwiseProgress(KvProgress):
    """Told by the test, layer by layer."""

    def __init__(self, num_tokens: int, lease: object) -> None:
        super().__init__(LAYERS, num_tokens)
        self.lease = cast("BlockLease", lease)
        self.tokens = [0] * LAYERS

    def available(self, layer: int) -> int:
        return self.tokens[layer]

    def after(self, layer: int) -> object | None:
        return ("after", layer)

    def tell(self, layer: int, tokens: int) -> None:
        self.tokens[layer] = tokens
        self._changed.set()


class Rig:
    """A sender with its pager, and the sequences it sends."""

    def __init__(self, *, memory: bool = False) -> None:
        self.pager = ArrayPager()
        self.counters = TransferCounters()
        self.memories: list[ArrayMemory] = []

        def new_memory(num_slots: int, slot_bytes: int) -> ArrayMemory:
            self.memories.append(ArrayMemory(num_slots, slot_bytes))
            return self.memories[-1]

        identity = Identity(
            worker_id="prefill-1",
            role="prefill",
            model_fingerprint="fingerprint",
            weights="float32",
            model=cast("Any", None),
            dtype=torch.float32,
            context_length=1000,
            kv_shape=SHAPE,
            total_blocks=10,
        )
        self.sender = KvSender(
            identity,
            cast("Any", self.pager),
            WireFormat.of(SHAPE, "same"),
            self.counters,
            cast("Any", new_memory) if memory else None,
        )

    def rows(self, epoch: int, num_tokens: int) -> np.ndarray[Any, Any]:
        shape = (LAYERS, 2, num_tokens, HEADS, HEAD_DIM)
        rows = np.random.default_rng(epoch).standard_normal(shape).astype(np.float32)
        self.pager.arrays[epoch] = rows
        return rows

    def complete(self, epoch: int, num_tokens: int) -> KvProgress:
        self.rows(epoch, num_tokens)
        return KvProgress.complete(cast("BlockLease", epoch), LAYERS, num_tokens)

    async def send(self, receiver: LinkReceiver, address: str, epoch: int) -> HandoffResult:
        progress = self.complete(epoch, receiver.num_tokens[epoch])
        return await self.sender.send(progress, ticket(epoch), address)


def ticket(epoch: int, worker_id: str = WORKER_ID) -> KvTicket:
    key = AttemptKey(request_id=f"request-{epoch}", attempt=1)
    return KvTicket(key=key, epoch=epoch, worker_id=worker_id)


@asynccontextmanager
async def rig_of(receiver: LinkReceiver, *, memory: bool = False) -> AsyncIterator[tuple[Rig, str]]:
    receiver.shared_memory = memory
    rig = Rig(memory=memory)
    async with receiver.serve() as address:
        try:
            yield rig, address
        finally:
            await rig.sender.close()
    assert all(memory.is_closed for memory in rig.memories)
    assert rig.counters.sending == 0


def check_landed(receiver: LinkReceiver, rig: Rig, epoch: int) -> None:
    landing = receiver.landings[epoch]
    assert landing.is_committed
    sent = rig.pager.arrays[epoch]
    assert np.array_equal(landing.rows[:, :, landing.reused :], sent[:, :, landing.reused :])


async def until(condition: Callable[[], Any], timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # the receiver knows no events
            await asyncio.sleep(0.005)
