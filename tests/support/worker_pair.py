"""A prefill and a decode worker in this process, and a small driver that plays the router."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import grpc
from fake_engine import FakeModel, fake_loaded, fake_sample

from legato.protos import common_pb2, worker_pb2, worker_pb2_grpc
from legato.worker.channel import CHANNEL_OPTIONS
from legato.worker.config import WorkerConfig
from legato.worker.sampler import launch_sample
from legato.worker.server import WorkerServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from legato.worker.forward import Model
    from legato.worker.models.config import ModelConfig

BLOCK_SIZE = 4
WAIT_S = 20.0  # bounds every wait of a test; nothing is measured against it


def sampling(max_tokens: int, **overrides: Any) -> common_pb2.SamplingParams:  # noqa: ANN401  # fields of the message
    settings: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 0,
        "ignore_eos": False,
        "min_tokens": 0,
    }
    settings.update(overrides)
    return common_pb2.SamplingParams(**settings)


def is_empty(load: common_pb2.WorkerLoad) -> bool:
    """free + cached == total, and nothing runs, waits or is promised."""
    return (
        load.free_blocks == load.total_blocks
        and not load.reserved_blocks
        and not load.held_blocks
        and not load.running
        and not load.waiting
        and not load.transferring
        and not load.waiting_tokens
        and not load.swapped
        and not load.swap_held_blocks
    )


@dataclass
class Worker:
    server: WorkerServer
    model: Any  # a FakeModel, unless the test brings a model of its own
    address: str
    channel: grpc.aio.Channel
    prefill: worker_pb2_grpc.PrefillWorkerAsyncStub = field(init=False)
    decode: worker_pb2_grpc.DecodeWorkerAsyncStub = field(init=False)
    control: worker_pb2_grpc.WorkerControlAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.prefill = worker_pb2_grpc.PrefillWorkerStub(self.channel)
        self.decode = worker_pb2_grpc.DecodeWorkerStub(self.channel)
        self.control = worker_pb2_grpc.WorkerControlStub(self.channel)

    def load(self) -> common_pb2.WorkerLoad:
        return self.server.node.load()

    async def until(self, condition: Callable[[common_pb2.WorkerLoad], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition(self.load()):  # noqa: ASYNC110  # gauges set no event
                await asyncio.sleep(0.005)

    async def until_idle(self) -> None:
        """LEAK0: every gauge is back at its baseline, and the pool is whole."""
        tickets = self.server.node.tickets
        await self.until(
            # Blocks go back before the last message is written.
            lambda load: is_empty(load) and len(tickets) == 0
        )
        self.server.node.pool.check_integrity()
        assert len(tickets._ledger) == 0


@asynccontextmanager
async def running_worker(
    role: str,
    *,
    config: ModelConfig | None = None,
    num_blocks: int = 64,
    fingerprint: str = "fake",
    exits: list[str] | None = None,
    step_timeout_s: float = 60.0,
    model: Model | None = None,
    **settings: Any,  # noqa: ANN401  # of WorkerConfig
) -> AsyncIterator[Worker]:
    loaded = fake_loaded(config, fingerprint)
    if model is not None:
        loaded = replace(loaded, model=model)
    shape = loaded.model.config
    block_size = settings.pop("block_size", BLOCK_SIZE)
    bytes_per_block = block_size * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
    settings.setdefault("prefill_chunk_tokens", 16)
    server = WorkerServer(
        WorkerConfig(
            model="fake",
            role=role,  # type: ignore[arg-type]  # tests pass literals
            kv_memory_bytes=num_blocks * bytes_per_block,
            block_size=block_size,
            num_threads=1,
            **settings,
        ),
        loaded,
        sample=fake_sample if model is None else launch_sample,
        exit_process=lambda: (exits if exits is not None else []).append("exit"),
        step_timeout_s=step_timeout_s,
    )
    address = await server.start()
    channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    try:
        yield Worker(server, loaded.model, address, channel)
    finally:
        if isinstance(loaded.model, FakeModel):
            loaded.model.go.set()
        await channel.close()
        await server.stop(0)


class OpenPrefill:
    """A Prefill call whose Request is on its way; may be used before that is written."""

    def __init__(self, worker: Worker, request: worker_pb2.PrefillRequest) -> None:
        self._call: Any = worker.prefill.Prefill(timeout=WAIT_S)
        command = worker_pb2.PrefillCommand(request=request)
        self._asked = asyncio.create_task(self._call.write(command))
        self._asked.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def write(self, command: worker_pb2.PrefillCommand) -> None:
        await asyncio.wait({self._asked})
        await self._call.write(command)

    async def read(self) -> Any:  # noqa: ANN401  # an event or EOF
        return await self._call.read()

    def cancel(self) -> None:
        self._call.cancel()


@dataclass
class Pair:
    p: Worker
    d: Worker

    async def until_idle(self) -> None:
        await self.p.until_idle()
        await self.d.until_idle()


@asynccontextmanager
async def running_pair(
    *,
    p: dict[str, Any] | None = None,
    d: dict[str, Any] | None = None,
    config: ModelConfig | None = None,
    model: Model | None = None,
) -> AsyncIterator[Pair]:
    async with (
        running_worker("prefill", config=config, model=model, **(p or {})) as prefill,
        running_worker("decode", config=config, model=model, **(d or {})) as decode,
    ):
        yield Pair(prefill, decode)


class Attempt:
    """One request's way over a pair, a step at a time. With several answers, `finish_all` is the
    last step; else `run` is all of them.
    """

    def __init__(
        self,
        pair: Pair,
        prompt: Sequence[int],
        params: common_pb2.SamplingParams,
        *,
        request_id: str = "r",
        attempt: int = 0,
        eos: Sequence[int] = (),
        emitted: Sequence[int] = (),
        cache_salt: str = "",
        num_answers: int = 1,
        priority: common_pb2.Priority.ValueType = common_pb2.PRIORITY_INTERACTIVE,
        arrival: int = 0,
    ) -> None:
        self.pair = pair
        self.prompt = list(prompt)
        self.tokens = [*prompt, *emitted]
        self.params = params
        self.eos = list(eos)
        self.cache_salt = cache_salt
        self.num_answers = num_answers
        self.priority = priority
        self.arrival = arrival
        self.num_preemptions = 0
        self.key = worker_pb2.AttemptKey(request_id=request_id, attempt=attempt)
        self.decode_call: Any = None
        self.prefill_call: Any = None
        self.ticket: worker_pb2.KvTicket | None = None
        self.first: worker_pb2.FirstToken | None = None
        self.num_joined = 0
        self.answers: dict[int, list[int]] = {}  # tokens of each of several
        self.preempted: dict[int, int] = {}  # those of them that were, how often
        self.open: set[int] = set()  # those of them that have not ended
        self.cut_off = False  # `stop` came too late, see there

    async def reserve(self) -> worker_pb2.KvTicket:
        """Waits for room like a router: asks again after RESOURCE_EXHAUSTED."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    return await self.reserve_once()
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
                    await asyncio.sleep(0.01)

    def reserve_message(self) -> worker_pb2.Reserve:
        return worker_pb2.Reserve(
            key=self.key,
            token_ids=self.tokens,
            num_prompt_tokens=len(self.prompt),
            sampling=self.params,
            eos_token_ids=self.eos,
            cache_salt=self.cache_salt,
            priority=self.priority,
            arrival=self.arrival,
            num_preemptions=self.num_preemptions,
            num_answers=self.num_answers,
        )

    async def reserve_once(self, reserve: worker_pb2.Reserve | None = None) -> worker_pb2.KvTicket:
        self.decode_call = self.pair.d.decode.Decode(timeout=WAIT_S)
        if reserve is None:
            reserve = self.reserve_message()
        # Where the worker has ended the call already, the read below says why.
        with suppress(asyncio.InvalidStateError):
            await self.decode_call.write(worker_pb2.DecodeCommand(reserve=reserve))
        event = await self.decode_call.read()
        if event == grpc.aio.EOF:
            raise AssertionError(f"no ticket: {await self.decode_call.details()}")
        self.ticket = event.ticket
        return event.ticket

    def prefill_request(self, address: str | None = None) -> worker_pb2.PrefillRequest:
        return worker_pb2.PrefillRequest(
            key=self.key,
            token_ids=self.tokens,
            num_prompt_tokens=len(self.prompt),
            sampling=self.params,
            eos_token_ids=self.eos,
            ticket=self.ticket,
            decode_address=(address or self.pair.d.address) if self.ticket else "",
            cache_salt=self.cache_salt,
            num_answers=self.num_answers,
        )

    def start_prefill(self, address: str | None = None) -> None:
        self.prefill_call = OpenPrefill(self.pair.p, self.prefill_request(address))

    async def retarget(self, ticket: worker_pb2.KvTicket, address: str) -> None:
        command = worker_pb2.Retarget(ticket=ticket, decode_address=address)
        await self.prefill_call.write(worker_pb2.PrefillCommand(retarget=command))

    async def first_token(self) -> worker_pb2.FirstToken:
        event = await self.prefill_call.read()
        assert event.WhichOneof("event") == "first_token", event
        self.first = event.first_token
        assert len(self.first.answers) == self.num_answers
        if self.num_answers == 1:
            self.tokens.append(self.first.answers[0].token.token_id)
        self.answers = {i: [a.token.token_id] for i, a in enumerate(self.first.answers)}
        return event.first_token

    async def handoff(self) -> worker_pb2.PrefillEvent:
        event: worker_pb2.PrefillEvent = await self.prefill_call.read()
        return event

    async def start_decode(self, answers: dict[int, int] | None = None) -> None:
        """`answers`: number and first token of those that go on; None: the only one does."""
        going_on = {0: self.tokens[-1]} if answers is None else answers
        self.open = set(going_on)
        await self.command(
            start=worker_pb2.Start(
                answers=[
                    worker_pb2.StartAnswer(answer=answer, token_id=token)
                    for answer, token in going_on.items()
                ]
            )
        )

    async def stop(self, answer: int) -> None:
        try:
            await self.command(stop=worker_pb2.Stop(answer=answer))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The call for one answer ends with it and waits for no Stop that is on its way; what
            # was still to be read is lost to who writes then, the status as well where gRPC was
            # told to write before it knew. Any other end is a fault.
            if isinstance(error, grpc.aio.AioRpcError):
                may_be_over = error.details() == "Internal error from Core"
            else:
                may_be_over = await self.decode_call.code() is grpc.StatusCode.OK
            if self.num_answers > 1 or not may_be_over:
                raise
            self.cut_off = True
        await self._note_end(answer)

    async def _note_end(self, answer: int) -> None:
        """As the router, it ends its side when it has all that it wants."""
        self.open.discard(answer)
        if not self.open:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self.decode_call.done_writing()

    async def command(self, **fields: Any) -> None:  # noqa: ANN401  # the message's own
        await self.decode_call.write(worker_pb2.DecodeCommand(**fields))

    async def run(self) -> list[int]:
        """All of it; returns the whole answer after checking events and figures on the way. Where
        it is preempted it goes on in an attempt of its own, as the router would have it.
        """
        while not await self._run_once():
            self.key.attempt += 1
            self.ticket = None
        return self.tokens[len(self.prompt) :]

    async def _run_once(self) -> bool:
        """False: preempted."""
        single = self.params.max_tokens - (len(self.tokens) - len(self.prompt)) == 1
        if not single:
            await self.reserve()
        self.start_prefill()
        offset = len(self.tokens)
        first = (await self.first_token()).answers[0]
        assert first.token.index == offset - len(self.prompt)
        if first.finished:
            self.close()
            return True
        await self.start_decode()
        handoff = await self.handoff()
        assert handoff.WhichOneof("event") == "handoff_done", handoff
        self.handed_over = handoff.handoff_done
        return await self._to_the_end(offset)

    async def run_locally(self) -> list[int]:
        """As `run`, where the decode worker prefills; one attempt, or the error that ends it."""
        await self.reserve()
        await self.start_locally()
        offset = len(self.tokens)
        if not (await self.local_first_token()).answers[0].finished:
            assert await self._to_the_end(offset), "preempted"
        else:
            assert await self.decode_call.read() == grpc.aio.EOF
        return self.tokens[len(self.prompt) :]

    async def start_locally(self) -> None:
        await self.command(start=worker_pb2.Start(local_prefill=True))

    async def local_first_token(self) -> worker_pb2.FirstToken:
        event = await self.decode_call.read()
        assert event != grpc.aio.EOF, await self.decode_call.details()
        assert event.WhichOneof("event") == "first_token", event
        [answer] = event.first_token.answers
        assert answer.token.index == len(self.tokens) - len(self.prompt)
        self.tokens.append(answer.token.token_id)
        self.first = event.first_token
        return event.first_token

    async def _to_the_end(self, offset: int) -> bool:
        """Joined, and all tokens behind the first, which came after `offset`; False: preempted."""
        joined = False
        while True:
            event = await self.decode_call.read()
            assert event != grpc.aio.EOF, await self.decode_call.details()
            match event.WhichOneof("event"):
                case "joined":
                    assert not joined
                    joined = True
                case "preempted":
                    assert joined
                    assert event.preempted.num_preemptions > self.num_preemptions
                    self.num_preemptions = event.preempted.num_preemptions
                    assert await self.decode_call.read() == grpc.aio.EOF
                    return False
                case kind:
                    assert (kind, joined) == ("tokens", True)
                    self._take(event.tokens)
                    if event.tokens.finished:
                        break
        self.finish = event.tokens
        assert event.tokens.decode_forwards == len(self.tokens) - offset - 1
        assert await self.decode_call.read() == grpc.aio.EOF
        return True

    def _take(self, tokens: worker_pb2.Tokens) -> None:
        for token in tokens.tokens:
            assert token.index == len(self.tokens) - len(self.prompt)
            self.tokens.append(token.token_id)

    async def next_event(self) -> worker_pb2.DecodeEvent | None:
        """Of several answers; None: the call has ended well."""
        try:
            event = await self.decode_call.read()
        except grpc.aio.AioRpcError as error:
            # As in `stop`: of one that was over already when it was told so.
            if self.open or error.details() != "Internal error from Core":
                raise
            return None
        if event == grpc.aio.EOF:
            assert await self.decode_call.code() is grpc.StatusCode.OK
            return None
        match event.WhichOneof("event"):
            case "joined":
                self.num_joined += 1
            case "tokens":
                answer = self.answers[event.tokens.answer]
                for token in event.tokens.tokens:
                    assert token.index == len(answer), "an index is skipped or doubled"
                    answer.append(token.token_id)
                if event.tokens.finished:
                    await self._note_end(event.tokens.answer)
            case "preempted":
                assert self.num_joined == 1, "so says the protocol"
                self.preempted[event.preempted.answer] = event.preempted.num_preemptions
                await self._note_end(event.preempted.answer)
        return event

    async def begin(self) -> list[int]:
        """Up to the hand-off; returns which of several answers go on."""
        await self.reserve()
        self.start_prefill()
        first = await self.first_token()
        live = {i: a.token.token_id for i, a in enumerate(first.answers) if not a.finished}
        if live:
            await self.start_decode(live)
            handoff = await self.handoff()
            assert handoff.WhichOneof("event") == "handoff_done", handoff
            self.handed_over = handoff.handoff_done
        return list(live)

    async def finish_all(self) -> dict[int, list[int]]:
        """To the end of the call; the answers with all that came of them."""
        while not self.cut_off and await self.next_event() is not None:
            pass
        assert self.num_joined <= 1
        return self.answers

    def close(self) -> None:
        for call in (self.prefill_call, self.decode_call):
            if call is not None:
                call.cancel()
