"""DecodeCall: what reaches the router in what order, and that the engine is rid of every answer."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import pytest
from ticket_room import TicketRoom, ticket_request

from legato.protos import worker_pb2
from legato.worker.handoff.tickets import LandedAnswer, Ticket
from legato.worker.mailbox import (
    BrokenEvent,
    EngineDiedError,
    JoinedEvent,
    Mailbox,
    PreemptedEvent,
    TokenEvent,
)
from legato.worker.sampler import Sampled
from legato.worker.sampling_params import SamplingParams
from legato.worker.sequence import FinishReason, Sequence
from legato.worker.services import decode_call
from legato.worker.services.answer_moves import AnswerMoves
from legato.worker.services.decode_call import DecodeCall
from legato.worker.services.errors import CallError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROWS = 9
WAIT_S = 10.0
NO_MOVES = AnswerMoves(None, None, "r", 1)  # type: ignore[arg-type]  # no answer moves here


def token(index: int, finish_reason: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(Sampled(40 + index, None, ()), index, finish_reason, index, 0.5, 0.0)


class FakeEngine:
    """Keeps what it is given until it is told to let go."""

    def __init__(self, room: TicketRoom) -> None:
        self.room = room
        self.there: dict[Sequence, LandedAnswer] = {}
        self.mailboxes: list[Mailbox] = []  # in the order in which they came
        self.released: list[Sequence] = []
        self.stopped: list[Sequence] = []

    def submit(self, sequence: Sequence) -> Mailbox:
        return self.fork(sequence, None)

    def fork(self, sequence: Sequence, source: int | None) -> Mailbox:
        assert sequence.claim is not None
        assert sequence.lease is not None
        answer = LandedAnswer(sequence.claim, sequence.lease, source)
        self.room.engine.append(answer)
        self.there[sequence] = answer
        self.mailboxes.append(Mailbox())
        return self.mailboxes[-1]

    def release(self, sequence: Sequence, _: Mailbox, *, stopped: bool = False) -> None:
        self.released.append(sequence)
        self.stopped += [sequence] if stopped else []
        self.room.end(self.there.pop(sequence))


@dataclass
class Router:
    """What it was told; it reads only while `reads` is set."""

    told: list[worker_pb2.DecodeEvent] = field(default_factory=list)
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    writing: int = 0
    commands: asyncio.Queue[worker_pb2.DecodeCommand | None] = field(default_factory=asyncio.Queue)

    async def write(self, event: worker_pb2.DecodeEvent) -> None:
        self.writing += 1
        assert self.writing == 1, "gRPC takes one message at a time"
        try:
            await self.reads.wait()
            self.told.append(event)
            await asyncio.sleep(0)  # as gRPC, which takes its time
        finally:
            self.writing -= 1

    async def says(self) -> AsyncIterator[worker_pb2.DecodeCommand]:
        while (command := await self.commands.get()) is not None:
            yield command

    def stop(self, answer: int) -> None:
        self.commands.put_nowait(worker_pb2.DecodeCommand(stop=worker_pb2.Stop(answer=answer)))

    def kinds(self) -> list[str | None]:
        return [event.WhichOneof("event") for event in self.told]


@dataclass
class Scene:
    room: TicketRoom
    engine: FakeEngine
    router: Router
    ticket: Ticket
    run: asyncio.Task[None]

    async def calm(self) -> None:
        """Everything that can happen now has happened."""
        for _ in range(20):
            await asyncio.sleep(0)

    def tell(
        self, which: int, *events: JoinedEvent | TokenEvent | BrokenEvent | PreemptedEvent
    ) -> None:
        for event in events:
            self.engine.mailboxes[which].put(event)


@asynccontextmanager
async def calling(
    num_answers: int = 2, *, landed: bool = True, prefills: bool = False
) -> AsyncIterator[Scene]:
    room = TicketRoom.of(40)
    engine, router = FakeEngine(room), Router()
    router.reads.set()
    ticket = room.reserve(ticket_request(ROWS, max_tokens=9, num_answers=num_answers))
    if landed and not prefills:
        room.book.begin_landing(ticket)
        room.book.finish_landing(ticket)
    sequences = {
        answer: Sequence(
            token_ids=[*range(ROWS), *([] if prefills else [99])],
            num_prompt_tokens=ROWS,
            params=SamplingParams.greedy_for(9),
            eos_token_ids=frozenset(),
            num_computed=ROWS,
        )
        for answer in range(num_answers)
    }
    call = DecodeCall(
        engine,  # type: ignore[arg-type]  # what it uses of one
        room.book,
        NO_MOVES,
        ticket,
        sequences,
        router.write,
        prefills=prefills,
    )
    run = asyncio.create_task(call.run(router.says()))
    scene = Scene(room, engine, router, ticket, run)
    await scene.calm()
    try:
        async with asyncio.timeout(WAIT_S):
            yield scene
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        room.book.close(ticket)
        await scene.calm()
        room.check()
        assert not engine.there
        assert len(engine.released) == len(engine.mailboxes)
        assert room.pool.usage().available == 40


async def test_the_first_answer_has_the_landed_blocks_and_the_rest_are_forks() -> None:
    async with calling(3) as scene:
        sources = [answer.source for answer in scene.engine.there.values()]
        assert scene.ticket.lease is not None
        assert sources == [None] + [scene.ticket.lease.blocks[2]] * 2
        scene.room.check()


async def test_events_come_in_order_and_the_last_end_is_the_calls() -> None:
    async with calling(2) as scene:
        scene.tell(0, JoinedEvent(), token(1))
        scene.tell(1, JoinedEvent(), token(1), token(2, FinishReason.STOP))
        await scene.calm()
        assert scene.router.kinds() == ["joined", "tokens", "tokens"]
        assert not scene.run.done()
        assert len(scene.engine.there) == 1, "an ended answer gives its blocks back at once"
        scene.tell(0, token(2), token(3, FinishReason.LENGTH))
        scene.router.commands.put_nowait(None)
        await scene.run
        last = scene.router.told[-1].tokens
        assert (last.answer, [t.index for t in last.tokens], last.finished) == (0, [2, 3], True)
        assert (last.decode_forwards, last.model_s) == (3, 0.5)


async def test_tokens_that_a_slow_reader_has_not_taken_come_before_the_error() -> None:
    async with calling(1) as scene:
        scene.tell(0, token(1), token(2), BrokenEvent(3))
        with pytest.raises(CallError, match="at output position 3 "):
            await scene.run
        (event,) = scene.router.told
        assert [t.token_id for t in event.tokens.tokens] == [41, 42]


@pytest.mark.parametrize("preempted", [False, True])
async def test_what_a_slow_reader_left_comes_in_messages_that_grpc_takes(preempted: bool) -> None:
    top = tuple((2**31 - 1 - i, -1.5 * i) for i in range(20))
    async with calling(1) as scene:
        scene.router.reads.clear()
        scene.tell(0, JoinedEvent())
        await scene.calm()
        reason = None if preempted else FinishReason.LENGTH
        for i in range(1, 20_001):
            sampled = Sampled(2**31 - 1, -1.5, top)
            end = reason if i == 20_000 else None
            scene.tell(0, TokenEvent(sampled, i, end, i, 0.5, 0.0))
        if preempted:
            scene.tell(0, PreemptedEvent(1))
        scene.router.reads.set()
        await scene.run
        sizes = [event.ByteSize() for event in scene.router.told]
        assert 100_000 < max(sizes) < 1_000_000
        told = [e.tokens for e in scene.router.told if e.HasField("tokens")]
        assert [t.index for tokens in told for t in tokens.tokens] == list(range(1, 20_001))
        assert [t.finished for t in told] == [False] * (len(told) - 1) + [not preempted]
        assert [t.decode_forwards for t in told] == [t.tokens[-1].index for t in told]
        assert scene.router.kinds()[-1] == ("preempted" if preempted else "tokens")


async def test_one_that_is_stopped_tells_no_more_of_what_waits() -> None:
    async with calling(2) as scene:
        scene.router.reads.clear()
        scene.tell(0, JoinedEvent())
        await scene.calm()
        scene.tell(0, *(token(i) for i in range(1, 5000)))
        scene.router.reads.set()
        while len(scene.router.told) < 2:  # noqa: ASYNC110  # it sets no event
            await asyncio.sleep(0)
        scene.router.reads.clear()
        scene.router.stop(0)
        await scene.calm()
        scene.router.reads.set()
        await scene.calm()
        assert len(scene.router.told) <= 4, "what was being written, and no more"
        assert not scene.run.done()


async def test_one_broken_answer_ends_the_call_after_what_is_being_written() -> None:
    async with calling(2) as scene:
        scene.router.reads.clear()
        scene.tell(0, token(1))
        await scene.calm()
        assert scene.router.writing == 1
        scene.tell(1, BrokenEvent(1))
        await scene.calm()
        assert not scene.run.done()
        scene.router.reads.set()
        with pytest.raises(CallError, match="at output position 1 "):
            await scene.run
        assert [e.tokens.answer for e in scene.router.told] == [0]


async def test_a_finished_answer_does_not_wait_for_a_slow_reader_to_be_freed() -> None:
    async with calling(1) as scene:
        scene.router.reads.clear()
        scene.tell(0, token(1, FinishReason.STOP))
        await scene.calm()
        assert not scene.engine.there
        assert scene.room.pool.usage().available == 40
        assert not scene.run.done()
        scene.router.reads.set()
        await scene.run
        assert scene.router.told[-1].tokens.finished


async def test_all_tokens_are_told_before_the_preemption() -> None:
    async with calling(2) as scene:
        scene.tell(1, JoinedEvent(), token(1), PreemptedEvent(2))
        scene.tell(0, PreemptedEvent(1))
        scene.router.commands.put_nowait(None)
        await scene.run
        assert sorted(map(str, scene.router.kinds())) == [
            "joined",
            "preempted",
            "preempted",
            "tokens",
        ]
        preempted = {
            e.preempted.answer: e.preempted.num_preemptions
            for e in scene.router.told
            if e.HasField("preempted")
        }
        assert preempted == {0: 1, 1: 2}
        kinds = [
            k
            for k, e in zip(scene.router.kinds(), scene.router.told, strict=True)
            if k != "preempted" or e.preempted.answer == 1
        ]
        assert kinds == ["joined", "tokens", "preempted"]


async def test_stop_frees_at_once_and_says_no_more_of_it() -> None:
    async with calling(2) as scene:
        scene.tell(0, JoinedEvent(), token(1))
        await scene.calm()
        scene.router.stop(0)
        await scene.calm()
        assert len(scene.engine.there) == 1
        assert scene.engine.stopped == scene.engine.released  # it ended, nobody cancelled it
        scene.tell(0, token(2))  # it was on its way
        scene.tell(1, token(1))
        scene.router.stop(0)
        await scene.calm()
        assert [e.tokens.answer for e in scene.router.told[1:]] == [0, 1]
        scene.router.stop(1)
        scene.router.commands.put_nowait(None)
        await scene.run


async def test_the_last_stop_waits_for_what_is_being_written() -> None:
    async with calling(2) as scene:
        scene.router.reads.clear()
        scene.tell(0, token(1))
        scene.tell(1, token(1))
        await scene.calm()
        scene.router.stop(0)
        scene.router.stop(1)
        await scene.calm()
        assert not scene.engine.there
        assert not scene.run.done()
        scene.router.reads.set()
        scene.router.commands.put_nowait(None)
        await scene.run
        assert len(scene.router.told) == 1  # the other had its turn to come


async def test_stop_before_the_kv_lands() -> None:
    async with calling(3, landed=False) as scene:
        scene.router.stop(0)
        await scene.calm()
        assert len(scene.room.ledger) == 2
        scene.room.book.begin_landing(scene.ticket)
        scene.router.stop(2)
        await scene.calm()
        assert len(scene.room.ledger) == 1
        scene.room.book.finish_landing(scene.ticket)
        await scene.calm()
        assert len(scene.engine.there) == 1
        scene.room.check()
        scene.tell(0, JoinedEvent(), token(1, FinishReason.STOP))
        scene.router.commands.put_nowait(None)
        await scene.run
        assert scene.router.told[-1].tokens.answer == 1


async def test_the_end_of_the_worker_between_landing_and_hand_over() -> None:
    async with calling(2, landed=False) as scene:
        scene.room.book.begin_landing(scene.ticket)
        scene.room.book.finish_landing(scene.ticket)
        scene.room.book.close_all()  # before the call gets its turn
        with pytest.raises(CallError, match="the worker ended before the KV had landed"):
            await scene.run
        assert not scene.engine.mailboxes


async def test_a_dead_engine_ends_the_call() -> None:
    async with calling(2) as scene:
        scene.engine.mailboxes[1].fail(EngineDiedError("gone"))
        with pytest.raises(EngineDiedError, match="gone"):
            await scene.run


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("reads", [False, True])
async def test_cancel_frees_all_wherever_it_waits(landed: bool, reads: bool) -> None:
    async with calling(3, landed=landed) as scene:
        if not reads:
            scene.router.reads.clear()
        if landed:
            for which in range(3):
                scene.tell(which, JoinedEvent(), token(1))
        await scene.calm()
        scene.run.cancel()
        await asyncio.gather(scene.run, return_exceptions=True)
        assert scene.run.cancelled()
        assert not scene.engine.there


async def test_a_router_that_closes_its_side_still_gets_its_answers() -> None:
    async with calling(1) as scene:
        scene.router.commands.put_nowait(None)
        await scene.calm()
        scene.tell(0, JoinedEvent(), token(1, FinishReason.LENGTH))
        await scene.run
        assert scene.router.kinds() == ["joined", "tokens"]


async def test_a_stop_that_meets_the_end_of_the_last_answer_is_taken() -> None:
    async with calling(2) as scene:
        for which in range(2):
            scene.tell(which, JoinedEvent(), token(1, FinishReason.STOP))
        await scene.calm()
        assert not scene.engine.there
        assert scene.room.pool.usage().available == 40, "nothing is held meanwhile"
        assert not scene.run.done()
        scene.router.stop(1)
        await scene.calm()
        assert not scene.run.done()
        scene.router.commands.put_nowait(None)
        await scene.run


@pytest.mark.parametrize("num_answers", [1, 2])
async def test_a_router_that_says_nothing_is_not_waited_for(
    num_answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_call, "LAST_STOP_S", 0.01 if num_answers == 2 else WAIT_S * 2)
    async with calling(num_answers) as scene:
        for which in range(num_answers):
            scene.tell(which, JoinedEvent(), token(1, FinishReason.STOP))
        await scene.run


async def test_one_that_leaves_before_it_joined_has_joined_for_the_router() -> None:
    async with calling(1) as scene:
        scene.tell(0, PreemptedEvent(1))
        await scene.run
        assert scene.router.kinds() == ["joined", "preempted"]


# Where the worker prefills.


async def test_the_first_token_comes_before_joined_and_its_figures_are_prefills() -> None:
    async with calling(1, prefills=True) as scene:
        scene.tell(0, JoinedEvent())
        await scene.calm()
        assert scene.router.told == []
        scene.tell(0, TokenEvent(Sampled(40, None, ()), 0, None, 3, 0.75, 0.25))
        await scene.calm()
        assert scene.router.kinds() == ["first_token", "joined"]
        first = scene.router.told[0].first_token
        assert [a.token.token_id for a in first.answers] == [40]
        assert (first.wait_s, first.model_s, first.prefill_forwards) == (0.25, 0.75, 3)
        scene.tell(0, TokenEvent(Sampled(41, None, ()), 1, FinishReason.LENGTH, 4, 1.0, 0.25))
        await scene.run
        tokens = scene.router.told[2].tokens
        assert (tokens.decode_forwards, tokens.model_s, tokens.finished) == (1, 0.25, True)


async def test_all_at_once_comes_in_the_same_order() -> None:
    async with calling(1, prefills=True) as scene:
        scene.tell(0, JoinedEvent(), token(0), token(1), token(2), PreemptedEvent(1))
        await scene.run
        assert scene.router.kinds() == ["first_token", "joined", "tokens", "preempted"]
        assert [t.index for t in scene.router.told[2].tokens.tokens] == [1, 2]


async def test_after_a_first_token_that_is_the_last_nothing_follows() -> None:
    async with calling(1, prefills=True) as scene:
        scene.tell(0, JoinedEvent(), token(0, FinishReason.STOP))
        await scene.run
        assert scene.router.kinds() == ["first_token"]
        assert scene.router.told[0].first_token.answers[0].finished


@pytest.mark.parametrize("joined", [False, True])
async def test_one_that_yields_before_its_first_token_may_ask_again(joined: bool) -> None:
    async with calling(1, prefills=True) as scene:
        scene.tell(0, *([JoinedEvent()] if joined else []), PreemptedEvent(1))
        with pytest.raises(CallError, match="before its first token") as raised:
            await scene.run
        assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert scene.router.told == []


async def test_the_engine_has_it_at_once_and_a_stop_or_a_cancel_takes_it_back() -> None:
    async with calling(1, prefills=True) as scene:
        assert len(scene.engine.there) == 1
        assert scene.room.pool.usage().held == 3
        scene.router.stop(0)
        await scene.run
        assert scene.router.told == []
    async with calling(1, prefills=True) as scene:
        scene.run.cancel()
        await asyncio.gather(scene.run, return_exceptions=True)
        assert not scene.engine.there


async def test_nothing_usable_in_a_prompts_logits_ends_the_call() -> None:
    async with calling(1, prefills=True) as scene:
        scene.tell(0, JoinedEvent(), BrokenEvent(0))
        with pytest.raises(CallError, match="at output position 0 "):
            await scene.run


async def test_the_end_of_the_worker_before_the_prefill() -> None:
    room = TicketRoom.of(40)
    ticket = room.reserve(ticket_request(ROWS, max_tokens=9))
    room.book.close_all()
    router = Router()
    sequence = Sequence([*range(ROWS)], ROWS, SamplingParams.greedy_for(9), frozenset())
    call = DecodeCall(
        FakeEngine(room),  # type: ignore[arg-type]  # what it uses of one
        room.book,
        NO_MOVES,
        ticket,
        {0: sequence},
        router.write,
        prefills=True,
    )
    with pytest.raises(CallError, match="the worker ended before the prefill") as raised:
        await call.run(router.says())
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE
