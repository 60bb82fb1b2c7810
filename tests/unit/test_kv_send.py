"""KvSender against a receiver that misbehaves at a chosen frame."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import grpc
import pytest
from kv_send_rig import (
    LAYERS,
    MEMORY,
    StepwiseProgress,
    check_landed,
    rig_of,
    ticket,
    until,
)
from link_receiver import (
    ROW_BYTES,
    WORKER_ID,
    FrameSeen,
    LinkReceiver,
)

from legato.protos.kv_transfer_pb2 import KvReceipt
from legato.worker.handoff import lanes, transfer
from legato.worker.handoff.handoff_error import HandoffError


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
