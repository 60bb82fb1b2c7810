"""KvSender against a receiver that misbehaves at a chosen frame."""

from __future__ import annotations

import asyncio
import errno
import time
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import grpc
import numpy as np
import pytest
import torch
from link_receiver import (
    HEAD_DIM,
    HEADS,
    ROW_BYTES,
    WORKER_ID,
    ArrayMemory,
    ArrayPager,
    FrameSeen,
    LinkReceiver,
)
from tcp_proxy import TcpProxy

from legato.protos.kv_transfer_pb2 import KvReceipt
from legato.protos.worker_pb2 import AttemptKey, KvTicket
from legato.worker.handoff import handoff_error, lanes, link, links, outgoing, transfer
from legato.worker.handoff.handoff_error import HandoffError
from legato.worker.handoff.retries import Retries
from legato.worker.handoff.sender import HandoffResult, KvSender
from legato.worker.handoff.shared_memory import MemoryRefusedError
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


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter times, in their proportions."""
    monkeypatch.setattr(link, "BEAT_S", 0.1)
    monkeypatch.setattr(link, "SILENCE_S", 0.5)
    monkeypatch.setattr(transfer, "PATIENCE_S", 1.0)
    monkeypatch.setattr(transfer, "UNREACHABLE_PATIENCE_S", 0.4)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows in a chunk."""
    for name in ("CHUNK_BYTES", "SLOT_BYTES"):
        monkeypatch.setattr(lanes, name, 10 * ROW_BYTES)
    return 10


@MEMORY
@pytest.mark.parametrize("num_tokens", [1, 10, 33])
async def test_all_rows_land(num_tokens: int, memory: bool, small_chunks: int) -> None:
    receiver = LinkReceiver(LAYERS, {5: num_tokens})
    async with rig_of(receiver, memory=memory) as (rig, address):
        result = await rig.send(receiver, address, 5)
        check_landed(receiver, rig, 5)
        num_bytes = LAYERS * num_tokens * ROW_BYTES
        assert (result.kv_bytes, result.reused_tokens) == (num_bytes, 0)
        lanes = (0, num_bytes) if memory else (num_bytes, 0)
        assert (rig.counters.bytes_by_grpc, rig.counters.bytes_by_memory) == lanes
        assert (rig.counters.completed, rig.counters.failed) == (1, 0)
        rows = [seen for seen in receiver.seen if seen.kind == "rows"]
        assert all(seen.num_bytes <= small_chunks * ROW_BYTES for seen in rows)


async def test_few_tokens_of_many_layers_share_a_frame() -> None:
    receiver = LinkReceiver(LAYERS, {5: 7})
    async with rig_of(receiver) as (rig, address):
        await rig.send(receiver, address, 5)
        rows = [seen.rows for seen in receiver.seen if seen.rows is not None]
        assert [(row.layer_start, row.num_layers) for row in rows] == [(0, LAYERS)]
        assert [seen.kind for seen in receiver.seen] == ["open", "rows", "commit"]


async def test_what_is_there_is_not_sent(small_chunks: int) -> None:
    receiver = LinkReceiver(LAYERS, {5: 40}, reused={5: 32})
    async with rig_of(receiver) as (rig, address):
        result = await rig.send(receiver, address, 5)
        check_landed(receiver, rig, 5)
        assert (result.kv_bytes, result.reused_tokens) == (LAYERS * 8 * ROW_BYTES, 32)


async def test_everything_is_there() -> None:
    receiver = LinkReceiver(LAYERS, {5: 32}, reused={5: 32})
    async with rig_of(receiver) as (rig, address):
        result = await rig.send(receiver, address, 5)
        assert (result.kv_bytes, result.reused_tokens) == (0, 32)
        assert [seen.kind for seen in receiver.seen] == ["open", "commit"]


async def test_a_layer_leaves_while_the_next_is_not_there_yet() -> None:
    receiver = LinkReceiver(LAYERS, {5: 20})
    async with rig_of(receiver) as (rig, address):
        rig.rows(5, 20)
        progress = StepwiseProgress(20, 5)
        sending = asyncio.create_task(rig.sender.send(progress, ticket(5), address))
        # In two steps, as a prompt that is computed in two chunks.
        for tokens in (12, 20):
            for layer in range(LAYERS):
                progress.tell(layer, tokens)
                await until(
                    lambda at=layer, n=tokens: (
                        5 in receiver.landings and receiver.landings[5].has[at].sum() == n
                    )
                )
                assert not receiver.landings[5].has[layer + 1 :, tokens - 1 :].any()
                if (layer, tokens) != (LAYERS - 1, 20):
                    assert not receiver.landings[5].is_committed
        progress.confirm()
        await sending
        check_landed(receiver, rig, 5)
        assert receiver.duplicates[5] == 0
        assert rig.pager.afters == [("after", layer) for _ in range(2) for layer in range(LAYERS)]


async def test_the_commit_waits_until_it_is_confirmed() -> None:
    receiver = LinkReceiver(LAYERS, {5: 20})
    async with rig_of(receiver) as (rig, address):
        rig.rows(5, 20)
        progress = StepwiseProgress(20, 5)
        for layer in range(LAYERS):
            progress.tell(layer, 20)
        sending = asyncio.create_task(rig.sender.send(progress, ticket(5), address))
        await until(lambda: 5 in receiver.landings and receiver.landings[5].has.all())
        await asyncio.sleep(0.05)
        assert not receiver.landings[5].is_committed
        progress.confirm()
        await sending
        assert receiver.landings[5].is_committed


NUM_FRAMES = 14  # Open, 12 chunks and Close of the transfer below


@MEMORY
@pytest.mark.parametrize("action", ["cut", "cut_after", "wrong_sequence", "wrong_status"])
async def test_it_resumes_at_every_frame(action: str, memory: bool, small_chunks: int) -> None:
    resent_rows = 0
    for bad in range(NUM_FRAMES):
        receiver = LinkReceiver(LAYERS, {5: 40})
        # Never twice: the second stream goes well.
        receiver.fault = lambda _, r=receiver, n=bad: (
            action if r.num_streams == 1 and len(r.seen) == n + 1 else None
        )
        async with rig_of(receiver, memory=memory) as (rig, address):
            result = await rig.send(receiver, address, 5)
            check_landed(receiver, rig, 5)
            assert receiver.num_streams == 2, bad
            assert result.kv_bytes == LAYERS * 40 * ROW_BYTES
            # Not once more than the frames that were under way or not told of.
            assert receiver.duplicates[5] <= 1 * small_chunks
            resent_rows += receiver.duplicates[5]
            assert rig.counters.resumed == (bad > 0)  # what was not open is not resumed
            if not memory:
                sent = rig.counters.bytes_sent
                assert sent <= result.kv_bytes + lanes.WINDOW_CHUNKS * small_chunks * ROW_BYTES
    assert len(receiver.seen) == NUM_FRAMES + 2  # the last one: Close, then Open and Close again
    assert resent_rows == 0  # it asked where to go on


@MEMORY
async def test_damaged_rows_are_sent_again(memory: bool, small_chunks: int) -> None:
    for times in (1, transfer.MAX_SENDS_PER_CHUNK - 1):
        receiver = LinkReceiver(LAYERS, {5: 40})
        count = {"n": 0}

        def fault(seen: FrameSeen, count: dict[str, int] = count, times: int = times) -> str | None:
            here = seen.rows is not None and (seen.rows.layer_start, seen.rows.token_start)
            if here == (1, 10) and count["n"] < times:
                count["n"] += 1
                return "resend"
            return None

        receiver.fault = fault
        async with rig_of(receiver, memory=memory) as (rig, address):
            await rig.send(receiver, address, 5)
            check_landed(receiver, rig, 5)
            assert rig.counters.chunks_resent == times


async def test_rows_that_are_damaged_too_often_end_the_transfer_alone(small_chunks: int) -> None:
    receiver = LinkReceiver(LAYERS, {5: 40, 6: 40})
    receiver.fault = lambda seen: "resend" if seen.kind == "rows" and seen.epoch == 5 else None
    async with rig_of(receiver) as (rig, address):
        good = asyncio.create_task(rig.send(receiver, address, 6))
        with pytest.raises(HandoffError, match="damaged 4 times") as caught:
            await rig.send(receiver, address, 5)
        assert caught.value.decode_lost
        await good
        check_landed(receiver, rig, 6)
        await until(lambda: receiver.landings[5].is_given_up)
        assert receiver.num_streams == 1


@pytest.mark.parametrize("kind", ["open", "rows", "commit"])
async def test_a_refusal_ends_one_transfer_and_no_other(kind: str, small_chunks: int) -> None:
    receiver = LinkReceiver(LAYERS, {5: 40, 6: 40})
    receiver.fault = lambda seen: "refuse" if (seen.kind, seen.epoch) == (kind, 5) else None
    async with rig_of(receiver) as (rig, address):
        good = asyncio.create_task(rig.send(receiver, address, 6))
        with pytest.raises(HandoffError, match="refused the KV: as the test wants") as caught:
            await rig.send(receiver, address, 5)
        assert caught.value.decode_lost
        await good
        check_landed(receiver, rig, 6)
        assert receiver.num_streams == 1
        assert (rig.counters.completed, rig.counters.failed) == (1, 1)
        # The link still serves.
        receiver.num_tokens[7] = 12
        await rig.send(receiver, address, 7)
        assert receiver.num_streams == 1


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED]
)
async def test_a_receiver_that_does_not_fit_is_not_asked_twice(code: grpc.StatusCode) -> None:
    receiver = LinkReceiver(LAYERS, {5: 40, 6: 4})
    receiver.hello_status = code, "kv_wire is 'same', this worker's is 'int8'"
    async with rig_of(receiver, memory=True) as (rig, address):
        results = await asyncio.gather(
            *(rig.send(receiver, address, epoch) for epoch in (5, 6)), return_exceptions=True
        )
        for error in results:
            assert isinstance(error, HandoffError)
            assert error.decode_lost
            assert error.refused
            assert "kv_wire is 'same'" in str(error)
        assert receiver.num_streams == 1


async def test_a_worker_that_was_restarted_is_another_one() -> None:
    receiver = LinkReceiver(LAYERS, {5: 40}, worker_id="decode-2")
    async with rig_of(receiver) as (rig, address):
        with pytest.raises(HandoffError, match="is 'decode-2', the ticket is of 'decode-1'"):
            await rig.send(receiver, address, 5)
        assert receiver.num_streams == 1


async def test_hello_says_who_sends_what_to_whom() -> None:
    receiver = LinkReceiver(LAYERS, {5: 4})
    async with rig_of(receiver, memory=True) as (rig, address):
        await rig.send(receiver, address, 5)
        hello = receiver.hellos[0]
        assert (hello.sender_worker_id, hello.receiver_worker_id) == ("prefill-1", WORKER_ID)
        assert (hello.model_fingerprint, hello.weights) == ("fingerprint", "float32")
        assert (hello.layout.num_layers, hello.layout.dtype) == (LAYERS, "float32")
        assert hello.kv_wire == "same"
        assert hello.memory.num_slots == lanes.NUM_SLOTS
        assert hello.memory.slot_bytes == lanes.SLOT_BYTES


async def test_memory_that_is_refused_is_given_up() -> None:
    receiver = LinkReceiver(LAYERS, {5: 4})
    async with rig_of(receiver, memory=True) as (rig, address):
        receiver.shared_memory = False
        await rig.send(receiver, address, 5)
        check_landed(receiver, rig, 5)
        assert rig.memories[0].is_closed
        assert rig.counters.bytes_by_memory == 0


async def test_a_short_transfer_passes_a_long_one(small_chunks: int) -> None:
    receiver = LinkReceiver(LAYERS, {5: 2000, **dict.fromkeys(range(10, 18), 9)})
    async with rig_of(receiver) as (rig, address):
        long = asyncio.create_task(rig.send(receiver, address, 5))
        await until(lambda: len(receiver.seen) > 20)
        await asyncio.gather(*(rig.send(receiver, address, epoch) for epoch in range(10, 18)))
        assert not long.done()
        await long
        assert receiver.num_streams == 1
        for epoch in (5, *range(10, 18)):
            check_landed(receiver, rig, epoch)
        # Between the Open and the last rows of a short one: a window of the long one's chunks and
        # then one a turn.
        for epoch in range(10, 18):
            places = [at for at, seen in enumerate(receiver.seen) if seen.epoch == epoch]
            between = receiver.seen[places[0] : places[-1]]
            assert sum(seen.epoch == 5 for seen in between) <= 3 * lanes.WINDOW_CHUNKS


async def test_transfers_take_turns(small_chunks: int) -> None:
    receiver = LinkReceiver(LAYERS, {5: 200, 6: 200})
    async with rig_of(receiver) as (rig, address):
        await asyncio.gather(*(rig.send(receiver, address, epoch) for epoch in (5, 6)))
        rows = [seen.epoch for seen in receiver.seen if seen.kind == "rows"]
        assert len(rows) == 2 * 60
        # From the first of the one until the last of the other: one had a window for itself.
        both = rows[rows.index(6) : len(rows) - rows[::-1].index(5)]
        assert len(both) >= 2 * 60 - 2 * lanes.WINDOW_CHUNKS - 4
        assert all(a != b for a, b in pairwise(both))


@MEMORY
async def test_no_more_than_a_window_is_unanswered(
    memory: bool, small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "WINDOW_BYTES", 5 * small_chunks * ROW_BYTES)
    monkeypatch.setattr(lanes, "NUM_SLOTS", 5)
    receiver = LinkReceiver(LAYERS, {5: 200, 6: 200})
    receiver.fault = lambda seen: "hold" if seen.kind == "rows" else None
    async with rig_of(receiver, memory=memory) as (rig, address):
        sends = [asyncio.create_task(rig.send(receiver, address, epoch)) for epoch in (5, 6)]
        await until(lambda: sum(seen.kind == "rows" for seen in receiver.seen) == 5)
        await asyncio.sleep(0.1)
        assert sum(seen.kind == "rows" for seen in receiver.seen) == 5
        receiver.release.set()
        await asyncio.gather(*sends)
        for epoch in (5, 6):
            check_landed(receiver, rig, epoch)


@MEMORY
async def test_many_small_chunks_are_bounded_by_their_number(
    memory: bool, small_chunks: int
) -> None:
    limit = lanes.NUM_SLOTS if memory else lanes.WINDOW_CHUNKS
    epochs = range(10, 40)
    receiver = LinkReceiver(LAYERS, dict.fromkeys(epochs, 1))
    receiver.fault = lambda seen: "hold" if seen.kind == "rows" else None
    async with rig_of(receiver, memory=memory) as (rig, address):
        sends = [asyncio.create_task(rig.send(receiver, address, epoch)) for epoch in epochs]

        def num_rows() -> int:
            return sum(seen.kind == "rows" for seen in receiver.seen)

        await until(lambda: num_rows() == limit)
        await asyncio.sleep(0.1)
        assert num_rows() == limit
        receiver.release.set()
        await asyncio.gather(*sends)
        for epoch in epochs:
            check_landed(receiver, rig, epoch)


@MEMORY
async def test_a_cancelled_transfer_tells_the_receiver(memory: bool, small_chunks: int) -> None:
    for held_at in range(1, 12):
        receiver = LinkReceiver(LAYERS, {5: 40, 6: 40})
        receiver.fault = lambda seen, r=receiver, n=held_at: (
            "hold" if seen.epoch == 5 and len(r.seen) == n else None
        )
        async with rig_of(receiver, memory=memory) as (rig, address):
            sending = asyncio.create_task(rig.send(receiver, address, 5))
            await until(lambda r=receiver, n=held_at: len(r.seen) >= n)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await until(lambda r=receiver: any(seen.kind == "give_up" for seen in r.seen))
            assert not receiver.landings[5].is_committed
            receiver.release.set()
            # Slots and window are there for the next one.
            await rig.send(receiver, address, 6)
            check_landed(receiver, rig, 6)
            assert receiver.num_streams == 1
            assert (rig.counters.completed, rig.counters.failed) == (1, 1)


async def test_rows_that_wait_for_a_cancelled_read_are_not_sent(small_chunks: int) -> None:
    receiver = LinkReceiver(LAYERS, {5: 40, 6: 4})
    async with rig_of(receiver) as (rig, address):
        rig.pager.gate = asyncio.Event()
        sending = asyncio.create_task(rig.send(receiver, address, 5))
        await until(lambda: len(receiver.seen) == 1)
        await asyncio.sleep(0.05)
        sending.cancel()
        await asyncio.wait([sending])
        rig.pager.gate.set()
        await until(lambda: len(receiver.seen) >= 2)
        await rig.send(receiver, address, 6)
        kinds = [seen.kind for seen in receiver.seen if seen.epoch == 5]
        assert kinds[0] == "open"
        assert set(kinds[1:]) == {"give_up"}


async def test_blocks_that_are_gone_are_this_side_s_fault(small_chunks: int) -> None:
    receiver = LinkReceiver(LAYERS, {5: 40, 6: 4})
    async with rig_of(receiver, memory=True) as (rig, address):
        rig.pager.released.add(5)
        with pytest.raises(HandoffError, match="its blocks are gone") as caught:
            await rig.send(receiver, address, 5)
        assert not caught.value.decode_lost
        rig.pager.error = RuntimeError("device lost")
        with pytest.raises(HandoffError, match="RuntimeError: device lost") as caught:
            await rig.send(receiver, address, 5)
        assert not caught.value.decode_lost
        rig.pager.error = None
        await rig.send(receiver, address, 6)
        check_landed(receiver, rig, 6)
        assert receiver.num_streams == 1
        await until(lambda: receiver.landings[5].is_given_up)


@pytest.mark.parametrize(
    ("landed", "reused", "what"),
    [
        ([4] * (LAYERS - 1), 0, "landed_tokens are"),
        ([4] * (LAYERS + 1), 0, "landed_tokens are"),
        ([4, 5, 4], 0, "landed_tokens are"),
        ([4, -1, 4], 0, "landed_tokens are"),
        ([4, 3, 4], 4, "reused_tokens is 4"),
        ([4, 4, 4], -1, "reused_tokens is -1"),
    ],
)
async def test_an_answer_to_open_that_makes_no_sense(
    landed: list[int], reused: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object) -> KvReceipt:
        return KvReceipt(status=KvReceipt.STATUS_OK, landed_tokens=landed, reused_tokens=reused)

    receiver = LinkReceiver(LAYERS, {5: 4})
    async with rig_of(receiver) as (rig, address):
        with monkeypatch.context() as patch:
            patch.setattr(receiver, "_answer", opened)
            with pytest.raises(HandoffError, match=what) as caught:
                await rig.send(receiver, address, 5)
            assert caught.value.decode_lost
            await until(lambda: receiver.seen[-1].kind == "give_up")


@pytest.mark.usefixtures("hurry")
async def test_silence_breaks_the_link_and_the_transfer_goes_on(small_chunks: int) -> None:
    receiver = LinkReceiver(LAYERS, {5: 40})

    def fault(_: FrameSeen) -> str | None:
        return "silent" if receiver.num_streams == 1 and len(receiver.seen) == 6 else None

    receiver.fault = fault
    async with rig_of(receiver) as (rig, address):
        await rig.send(receiver, address, 5)
        check_landed(receiver, rig, 5)
        assert (receiver.num_streams, rig.counters.resumed) == (2, 1)


async def test_rows_over_a_slow_path_come_once_over_one_connection() -> None:
    """All at once they would keep gRPC's pings back for longer than gRPC waits for them."""
    tokens = 3500
    receiver = LinkReceiver(LAYERS, {5: tokens})
    async with rig_of(receiver) as (rig, address), TcpProxy(address) as proxy:
        proxy.bytes_per_s = 0.4e6
        await rig.send(receiver, proxy.address, 5)
        check_landed(receiver, rig, 5)
        assert receiver.num_streams == 1
        assert receiver.duplicates[5] == 0
        assert rig.counters.bytes_sent == LAYERS * tokens * ROW_BYTES


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("how", ["mute", "cut", "nobody"])
async def test_a_receiver_that_does_not_come_back_is_lost(how: str, small_chunks: int) -> None:
    receiver = LinkReceiver(LAYERS, {5: 40})
    if how == "cut":
        receiver.fault = lambda seen: "cut" if seen.kind == "rows" else None
    receiver.is_mute = how == "mute"
    async with rig_of(receiver) as (rig, address):
        if how == "nobody":
            address = "127.0.0.1:1"
        with pytest.raises(HandoffError, match="is out of reach") as caught:
            async with asyncio.timeout(10):
                await rig.send(receiver, address, 5)
        assert caught.value.decode_lost
        if how != "nobody":
            assert receiver.num_streams > 1


async def test_a_connection_that_is_refused_at_once_is_not_tried_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert transfer.UNREACHABLE_PATIENCE_S < transfer.PATIENCE_S
    monkeypatch.setattr(transfer, "UNREACHABLE_PATIENCE_S", 0.3)
    monkeypatch.setattr(transfer, "PATIENCE_S", 60.0)
    async with rig_of(LinkReceiver(LAYERS, {5: 40})) as (rig, _):
        with pytest.raises(HandoffError, match="is out of reach") as caught:
            async with asyncio.timeout(10):
                await rig.sender.send(rig.complete(5, 40), ticket(5), "127.0.0.1:1")
        assert (caught.value.decode_lost, caught.value.refused) == (True, False)


async def test_a_link_that_was_there_is_waited_for_longer(
    small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port is closed for a while; silence before the welcome is no refusal either."""
    monkeypatch.setattr(link, "SILENCE_S", 0.3)
    monkeypatch.setattr(transfer, "UNREACHABLE_PATIENCE_S", 0.1)
    receiver = LinkReceiver(LAYERS, {5: 40, 6: 40})
    receiver.fault = lambda seen: "cut_after" if receiver.num_streams == 1 else None
    async with rig_of(receiver) as (rig, address):
        await rig.send(receiver, address, 5)
        receiver.is_mute = True
        await until(lambda: rig.sender._links._links == {} or receiver.num_streams == 2)
        for held in list(rig.sender._links._links.values()):
            held.is_open = False  # the next transfer makes a link of its own
        sending = asyncio.create_task(rig.send(receiver, address, 6))
        await until(lambda: receiver.num_streams == 4)
        receiver.is_mute = False
        await sending
        check_landed(receiver, rig, 6)


@pytest.mark.parametrize("memory", [False, True])
async def test_a_worker_that_can_make_no_socket_says_so(
    memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_socket(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    receiver = LinkReceiver(LAYERS, {5: 40})
    async with rig_of(receiver, memory=memory) as (rig, _):
        monkeypatch.setattr(handoff_error.socket, "socket", no_socket)
        with pytest.raises(HandoffError, match=r"can open no link: .*Too many open") as caught:
            await rig.sender.send(rig.complete(5, 40), ticket(5), "127.0.0.1:1")
        assert not caught.value.decode_lost
        await until(lambda: not rig.sender._links._links)
        monkeypatch.undo()
        monkeypatch.setattr(rig.sender._links, "to", no_socket)
        with pytest.raises(HandoffError, match=r"can open no link: .*Too many open") as caught:
            await rig.send(receiver, "127.0.0.1:1", 5)
        assert not caught.value.decode_lost


async def test_what_the_receiver_says_is_told_as_one_clean_line() -> None:
    receiver = LinkReceiver(LAYERS, {5: 40})
    receiver.hello_status = grpc.StatusCode.FAILED_PRECONDITION, "\x00\x1b[31m\r\n" + "x" * 5000
    async with rig_of(receiver) as (rig, address):
        with pytest.raises(HandoffError) as caught:
            await rig.send(receiver, address, 5)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 600
        assert (caught.value.decode_lost, caught.value.refused) == (True, True)


@MEMORY
async def test_a_link_that_breaks_again_and_again_is_tried_less_and_less(
    memory: bool, small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PATIENCE_S", 2.0)
    opened_at_s: list[float] = []
    receiver = LinkReceiver(LAYERS, {5: 40, 6: 40})

    def fault(seen: FrameSeen) -> str | None:
        if seen.kind == "open":
            opened_at_s.append(time.monotonic())
        return "cut" if seen.kind == "rows" else None

    receiver.fault = fault
    async with rig_of(receiver, memory=memory) as (rig, address):
        started_at_s = time.monotonic()
        results = await asyncio.gather(
            *(rig.send(receiver, address, epoch) for epoch in (5, 6)), return_exceptions=True
        )
        assert all("is out of reach" in str(error) for error in results)
        assert time.monotonic() - started_at_s < 2.0 + 1.0
        # 0, 0.05, 0.15, 0.35, 0.75, 1.55 s, and not at 2.55
        assert 4 <= receiver.num_streams <= 6
        streams: dict[int, float] = {}
        for seen, at_s in zip(
            (seen for seen in receiver.seen if seen.kind == "open"), opened_at_s, strict=True
        ):
            streams.setdefault(seen.stream, at_s)
        pauses_s = [after - before for before, after in pairwise(streams.values())]
        for pause_s, least_s in zip(pauses_s, (0.05, 0.1, 0.2, 0.4, 0.8), strict=False):
            assert pause_s >= least_s
        assert len(rig.memories) == memory  # the first one's served all


async def test_rows_that_land_make_the_next_try_soon_again() -> None:
    retries = Retries(None)
    now_s = 100.0
    assert retries.wait_s(now_s) == 0
    waits_s = []
    for _ in range(7):
        retries.broke(now_s, moved_rows=False)
        waits_s.append(round(retries.wait_s(now_s), 6))
        now_s += 10
    assert waits_s == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    retries.broke(now_s, moved_rows=True)
    assert round(retries.wait_s(now_s), 6) == 0.05
    assert retries.wait_s(now_s + 1) == 0


async def test_what_is_the_same_at_every_try_is_logged_once(
    small_chunks: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PATIENCE_S", 1.0)
    caplog.set_level("INFO", "legato")
    receiver = LinkReceiver(LAYERS, {5: 40})
    receiver.fault = lambda seen: "cut" if seen.kind == "rows" else None
    async with rig_of(receiver, memory=True) as (rig, address):
        receiver.shared_memory = False
        with pytest.raises(HandoffError, match="is out of reach"):
            await rig.send(receiver, address, 5)
        assert receiver.num_streams > 2
        assert [hello.HasField("memory") for hello in receiver.hellos[:3]] == [True, False, False]
        (record,) = caplog.records
        why = "KV to {} goes by gRPC, not by shared memory: the receiver gives no reason"
        assert record.getMessage() == why.format(address)


async def test_memory_that_cannot_be_had_is_logged_once(
    small_chunks: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: int) -> ArrayMemory:
        raise MemoryRefusedError("memfd_create: Too many open files")

    monkeypatch.setattr(transfer, "PATIENCE_S", 1.0)
    receiver = LinkReceiver(LAYERS, {5: 40})
    receiver.fault = lambda seen: "cut" if seen.kind == "rows" and seen.stream < 4 else None
    async with rig_of(receiver, memory=True) as (rig, address):
        monkeypatch.setattr("link_receiver.ArrayMemory.__init__", no_memory)
        await rig.send(receiver, address, 5)
        check_landed(receiver, rig, 5)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "Too many open files" in caplog.text


async def test_memory_of_a_broken_link_goes_where_nobody_comes_back(
    small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "RETRIES_KEPT_S", 0.2)
    receiver = LinkReceiver(LAYERS, {5: 40})
    receiver.fault = lambda seen: "cut" if seen.kind == "commit" and seen.stream == 1 else None
    async with rig_of(receiver, memory=True) as (rig, address):
        await rig.send(receiver, address, 5)
        assert len(rig.memories) == 1  # the second link has it
        await asyncio.sleep(0.4)
        assert not rig.memories[0].is_closed
        receiver.num_tokens[6] = 40
        receiver.fault = lambda seen: "refuse" if seen.epoch == 6 else None
        with pytest.raises(HandoffError, match="refused"):
            await rig.send(receiver, address, 6)
        receiver.num_tokens[7] = 40
        receiver.fault = lambda seen: "cut" if seen.epoch == 7 else None
        sending = asyncio.create_task(rig.send(receiver, address, 7))
        # The third stream is cut, too: nobody has asked for a fourth when the send is cancelled.
        await until(lambda: any(s.stream == 3 and s.epoch == 7 for s in receiver.seen))
        sending.cancel()
        await asyncio.wait([sending])
        await until(lambda: rig.memories[0].is_closed)


@pytest.mark.usefixtures("hurry")
async def test_a_receiver_that_lives_but_answers_nothing_is_lost(
    small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "ANSWER_TIMEOUT_S", 0.5)
    receiver = LinkReceiver(LAYERS, {5: 40})
    receiver.fault = lambda seen: "hold" if seen.kind == "open" else None
    async with rig_of(receiver) as (rig, address):
        monkeypatch.setattr(link, "SILENCE_S", 30.0)
        with pytest.raises(HandoffError, match="is out of reach"):
            async with asyncio.timeout(10):
                await rig.send(receiver, address, 5)


@pytest.mark.usefixtures("hurry")
async def test_waiting_for_the_computation_is_not_the_receiver_s_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "PATIENCE_S", 0.4)
    receiver = LinkReceiver(LAYERS, {5: 20})
    receiver.fault = lambda seen: "cut" if seen.stream == 1 and seen.kind == "rows" else None
    async with rig_of(receiver) as (rig, address):
        rig.rows(5, 20)
        progress = StepwiseProgress(20, 5)
        sending = asyncio.create_task(rig.sender.send(progress, ticket(5), address))
        await until(lambda: receiver.num_streams == 1)
        await asyncio.sleep(1.0)
        assert receiver.beats > 0
        for layer in range(LAYERS):
            progress.tell(layer, 20)
        progress.confirm()
        await sending
        check_landed(receiver, rig, 5)
        assert receiver.num_streams == 2


@pytest.mark.usefixtures("hurry")
async def test_an_idle_link_ends_and_a_new_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "IDLE_S", 0.2)
    receiver = LinkReceiver(LAYERS, {5: 20, 6: 20})
    async with rig_of(receiver, memory=True) as (rig, address):
        await rig.send(receiver, address, 5)
        await until(lambda: rig.memories[0].is_closed)
        await rig.send(receiver, address, 6)
        assert (receiver.num_streams, rig.counters.resumed) == (2, 0)


async def test_numbers_that_are_used_up_make_a_new_link(
    small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "LAST_SEQUENCE", 8)
    receiver = LinkReceiver(LAYERS, {5: 40})
    async with rig_of(receiver) as (rig, address):
        await rig.send(receiver, address, 5)
        check_landed(receiver, rig, 5)
        assert receiver.num_streams > 1


async def test_the_end_of_the_worker_ends_its_transfers(small_chunks: int) -> None:
    receiver = LinkReceiver(LAYERS, {5: 40})
    receiver.fault = lambda seen: "hold" if seen.kind == "open" else None
    async with rig_of(receiver, memory=True) as (rig, address):
        sending = asyncio.create_task(rig.send(receiver, address, 5))
        await until(lambda: receiver.seen)
        await rig.sender.close()
        with pytest.raises(HandoffError, match="this worker ends") as caught:
            await sending
        assert not caught.value.decode_lost


async def test_closing_at_once_ends_a_transfer_too() -> None:
    receiver = LinkReceiver(LAYERS, {5: 40})
    async with rig_of(receiver) as (rig, address):
        sending = asyncio.create_task(rig.send(receiver, address, 5))
        await asyncio.sleep(0)
        await rig.sender.close()
        with pytest.raises(HandoffError, match="this worker ends"):
            async with asyncio.timeout(5):
                await sending
