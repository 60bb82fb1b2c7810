"""PrefillCall: the hand-off beside the computation, and Retargets, with a sender that obeys."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import pytest
from fake_engine import VOCAB_SIZE
from worker_pair import sampling

from legato.protos import worker_pb2
from legato.worker.handoff.handoff_error import HandoffError
from legato.worker.handoff.sender import HandoffResult
from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import BlockPool
from legato.worker.kv.progress import KvProgress
from legato.worker.mailbox import BrokenEvent, Mailbox, TokenEvent
from legato.worker.sampler import Sampled
from legato.worker.sequence import FinishReason, Sequence
from legato.worker.services import prefill_call
from legato.worker.services.errors import CallError
from legato.worker.services.prefill_call import PrefillCall
from legato.worker.services.validation import read_sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NUM_TOKENS = 6


@dataclass
class Send:
    progress: KvProgress
    epoch: int
    address: str
    over: asyncio.Future[HandoffResult]
    cancelled: bool = False


@dataclass
class Sender:
    sends: list[Send] = field(default_factory=list)

    async def send(
        self, progress: KvProgress, ticket: worker_pb2.KvTicket, address: str
    ) -> HandoffResult:
        send = Send(progress, ticket.epoch, address, asyncio.get_running_loop().create_future())
        self.sends.append(send)
        try:
            return await send.over
        except asyncio.CancelledError:
            send.cancelled = True
            raise


@dataclass
class Scene:
    """One call under way, and the hands that move it."""

    sender: Sender
    sequence: Sequence
    mailbox: Mailbox
    events: list[worker_pb2.PrefillEvent]
    commands: asyncio.Queue[worker_pb2.PrefillCommand | None]
    run: asyncio.Task[None]

    def first_token(self, finish: FinishReason | None = None) -> None:
        self.mailbox.put(TokenEvent(Sampled(7, None, ()), 0, finish, 1, 0.002, 0.001))

    async def command(self, **fields: object) -> None:
        await self.commands.put(worker_pb2.PrefillCommand(**fields))  # type: ignore[arg-type]
        await settle()

    async def retarget(self, epoch: int, request_id: str = "r", address: str = "there") -> None:
        key = worker_pb2.AttemptKey(request_id=request_id, attempt=epoch)
        ticket = worker_pb2.KvTicket(key=key, epoch=epoch)
        await self.command(retarget=worker_pb2.Retarget(ticket=ticket, decode_address=address))

    @property
    def kinds(self) -> list[str | None]:
        return [event.WhichOneof("event") for event in self.events]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@asynccontextmanager
async def call(*, ticket: bool = True) -> AsyncIterator[Scene]:
    request = worker_pb2.PrefillRequest(
        key=worker_pb2.AttemptKey(request_id="r", attempt=1), decode_address="here"
    )
    if ticket:
        request.ticket.epoch = 1
        request.ticket.key.CopyFrom(request.key)
    pool = BlockPool(4)
    blocks = pool.acquire((), 2)
    assert blocks is not None
    sequence = Sequence(
        token_ids=list(range(NUM_TOKENS)),
        num_prompt_tokens=NUM_TOKENS,
        params=read_sampling(sampling(5), VOCAB_SIZE),
        eos_token_ids=frozenset(),
        lease=BlockLease(pool, blocks[0]),
        progress=KvProgress(2, NUM_TOKENS) if ticket else None,
    )
    events: list[worker_pb2.PrefillEvent] = []
    commands: asyncio.Queue[worker_pb2.PrefillCommand | None] = asyncio.Queue()

    async def write(event: worker_pb2.PrefillEvent) -> None:
        events.append(event)

    async def read() -> AsyncIterator[worker_pb2.PrefillCommand]:
        while (command := await commands.get()) is not None:
            yield command

    sender, mailbox = Sender(), Mailbox()
    it = PrefillCall(sender, sequence, mailbox, request, write)  # type: ignore[arg-type]  # of a KvSender, send alone
    run = asyncio.create_task(it.run(read()))
    await settle()
    yield Scene(sender, sequence, mailbox, events, commands, run)
    run.cancel()
    await asyncio.wait({run})
    await settle()
    assert all(send.over.done() for send in sender.sends), "a transfer outlives its call"


def done(num_bytes: int) -> HandoffResult:
    return HandoffResult(kv_bytes=num_bytes, transfer_s=0.5, reused_tokens=2)


async def test_the_hand_off_begins_with_the_call_and_is_told_after_the_first_token() -> None:
    async with call() as scene:
        [send] = scene.sender.sends
        assert (send.epoch, send.address) == (1, "here")
        assert send.progress is scene.sequence.progress
        confirmed = asyncio.create_task(send.progress.confirmed())
        await settle()
        assert not confirmed.done()
        scene.first_token()
        await settle()
        assert confirmed.done()
        assert scene.kinds == ["first_token"]
        send.over.set_result(done(123))
        await scene.run
        assert scene.kinds == ["first_token", "handoff_done"]
        told = scene.events[1].handoff_done
        assert (told.kv_bytes, told.transfer_s, told.reused_tokens) == (123, 0.5, 2)
        assert told.num_retargets == 0


@pytest.mark.parametrize("end", ["finished", "broken", "cancelled"])
async def test_kv_that_nobody_goes_on_with_is_never_confirmed(end: str) -> None:
    async with call() as scene:
        [send] = scene.sender.sends
        confirmed = asyncio.create_task(send.progress.confirmed())
        if end == "finished":
            scene.first_token(FinishReason.STOP)
            await scene.run
        elif end == "broken":
            scene.mailbox.put(BrokenEvent(0))
            with pytest.raises(CallError) as raised:
                await scene.run
            assert raised.value.code is grpc.StatusCode.INTERNAL
        else:
            scene.run.cancel()
        await settle()
        assert send.cancelled
        assert not confirmed.done()
        assert scene.kinds == (["first_token"] if end == "finished" else [])
        confirmed.cancel()


async def test_without_a_ticket_the_first_token_is_all() -> None:
    async with call(ticket=False) as scene:
        scene.first_token()
        await scene.run
        assert scene.kinds == ["first_token"]
        assert scene.sender.sends == []


@pytest.mark.parametrize("moment", ["before the first token", "after it", "as the old one is done"])
async def test_a_retarget_replaces_the_hand_off(moment: str) -> None:
    async with call() as scene:
        if moment == "before the first token":
            await scene.retarget(2)
            scene.first_token()
        else:
            scene.first_token()
            await settle()
            if moment == "as the old one is done":
                scene.sender.sends[0].over.set_result(done(1))
            await scene.retarget(2)
        await settle()
        old, new = scene.sender.sends
        assert old.cancelled or moment == "as the old one is done"
        assert (new.epoch, new.address, new.progress) == (2, "there", old.progress)
        assert scene.kinds == ["first_token"]
        new.over.set_result(done(5))
        await scene.run
        assert scene.kinds == ["first_token", "handoff_done"]
        assert scene.events[1].handoff_done.num_retargets == 1


async def test_after_a_lost_decode_worker_the_blocks_wait_for_a_retarget() -> None:
    async with call() as scene:
        scene.sender.sends[0].over.set_exception(HandoffError("gone", decode_lost=True))
        await settle()
        assert scene.kinds == [], "FirstToken comes first"
        scene.first_token()
        await settle()
        assert scene.kinds == ["first_token", "handoff_failed"]
        failed = scene.events[1].handoff_failed
        assert (failed.decode_lost, failed.reason, failed.num_retargets) == (True, "gone", 0)
        await scene.retarget(2)
        scene.sender.sends[1].over.set_exception(HandoffError("gone too", decode_lost=True))
        await settle()
        assert scene.events[2].handoff_failed.num_retargets == 1
        await scene.retarget(3)
        assert not scene.run.done()
        scene.sender.sends[2].over.set_result(done(9))
        await scene.run
        assert scene.events[3].handoff_done.num_retargets == 2


@pytest.mark.parametrize("decode_lost", [True, False])
async def test_the_blocks_do_not_wait_for_ever(
    decode_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prefill_call.RETARGET_WAIT_S == 5.0
    monkeypatch.setattr(prefill_call, "RETARGET_WAIT_S", 0.05 if decode_lost else 60.0)
    async with call() as scene:
        scene.first_token()
        scene.sender.sends[0].over.set_exception(HandoffError("gone", decode_lost=decode_lost))
        await asyncio.wait_for(scene.run, 5)
        assert scene.kinds == ["first_token", "handoff_failed"]


@pytest.mark.parametrize(
    ("how", "named"), [("request", "request"), ("other", "ticket.key"), ("nowhere", "address")]
)
async def test_a_wrong_command_ends_the_call_naming_what_is_wrong(how: str, named: str) -> None:
    async with call() as scene:
        if how == "request":
            await scene.command(request=worker_pb2.PrefillRequest())
        elif how == "other":
            await scene.retarget(2, request_id="another")
        else:
            await scene.retarget(2, address="")
        with pytest.raises(CallError) as raised:
            await asyncio.wait_for(scene.run, 5)
        assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert named in raised.value.message
        await settle()
        assert all(send.cancelled for send in scene.sender.sends)


async def test_a_retarget_needs_a_ticket_to_replace() -> None:
    async with call(ticket=False) as scene:
        await scene.retarget(2)
        with pytest.raises(CallError) as raised:
            await asyncio.wait_for(scene.run, 5)
        assert "no ticket" in raised.value.message


async def test_a_router_that_ends_its_side_still_gets_everything() -> None:
    async with call() as scene:
        await scene.commands.put(None)
        await settle()
        scene.first_token()
        scene.sender.sends[0].over.set_result(done(1))
        await scene.run
        assert scene.kinds == ["first_token", "handoff_done"]
