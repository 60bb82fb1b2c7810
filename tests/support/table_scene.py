"""TableScene: a router over real workers in this process, and one request stopped in any state."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import permutations, product
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
from client_stream import Stream
from link_proxy import LinkProxy
from loop_lag import loop_lag
from raw_client import RawClient
from router_service import FakeControl, fake_router
from table_state import (
    CONFIG,
    HANDOFF_BYTES,
    HELD_DECODE_STEP,
    HELD_PREFILL_STEP,
    NUM_TOKENS,
    OTHER_PROMPT,
    PREFILL_CHUNK_TOKENS,
    PROMPT,
    State,
    StepHold,
    gate_of,
)
from tcp_proxy import TcpProxy
from worker_pair import WAIT_S, Worker, is_empty, running_worker, sampling

from legato.cluster.client_channels import CHANNEL_OPTIONS
from legato.cluster.config import RouterOptions
from legato.cluster.control_plane import WorkerEndpoint
from legato.protos import generation_pb2, generation_pb2_grpc, worker_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from legato.cluster.control_plane import Role
    from legato.worker.handoff.sender import HandoffResult
    from legato.worker.kv.progress import KvProgress

T = TypeVar("T")
MOST_AT_ONCE = 16


class TableScene:
    """Use as an async context manager. The router and the prefill workers reach each worker over
    connections of their own, which can be cut and frozen apart. `local`: decode workers may prefill
    themselves; the test has it that they do. `rows_passed`: frames of rows, before the middle.
    """

    def __init__(
        self,
        *,
        prefills: int = 1,
        decodes: int = 1,
        lane: str = "grpc",
        local: bool = False,
        p: dict[str, Any] | None = None,
        d: dict[str, Any] | None = None,
        rows_passed: int = 2,
        step_timeout_s: float = 60.0,
    ) -> None:
        self._counts: dict[Role, int] = {"prefill": prefills, "decode": decodes}
        common: dict[str, Any] = {
            "kv_lane": lane,
            "prefill_chunk_tokens": PREFILL_CHUNK_TOKENS,
            "step_timeout_s": step_timeout_s,
        }
        self._settings: dict[str, dict[str, Any]] = {
            "prefill": {**common, **(p or {})},
            "decode": {**common, **(d or {})},
        }
        self._local_prefill_tokens = 128 if local else 0
        self._rows_passed = rows_passed
        self._stack = AsyncExitStack()
        self.workers: list[Worker] = []  # those that are dead are taken out
        self.prefills: list[Worker] = []
        self.decodes: list[Worker] = []
        self.holds: dict[int, StepHold] = {}  # by the worker's id()
        self.to_worker: dict[int, TcpProxy] = {}  # from the router
        self.link_cables: dict[tuple[int, int], TcpProxy] = {}  # from a sender to a decode worker
        self.links: dict[tuple[int, int], LinkProxy] = {}
        self.streams: list[Stream] = []
        self.struck_at_s = 0.0

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()
        for stream in self.streams:
            stream.call.cancel()
        await asyncio.gather(*(s.reading for s in self.streams), return_exceptions=True)
        await self._stack.aclose()

    async def _start(self) -> None:
        enter = self._stack.enter_async_context
        endpoints = []
        for role, count in self._counts.items():
            for _ in range(count):
                settings = self._settings[role]
                worker = await enter(running_worker(role, config=CONFIG, **settings))
                self.workers.append(worker)
                (self.prefills if role == "prefill" else self.decodes).append(worker)
                self.holds[id(worker)] = StepHold(worker)
                proxy = await enter(TcpProxy(worker.address))
                self.to_worker[id(worker)] = proxy
                endpoints.append(WorkerEndpoint(worker.server.worker_id, role, proxy.address))
        for sender, d in (
            *product(self.prefills, self.decodes),
            *permutations(self.decodes, 2),
        ):
            link = self.links[id(sender), id(d)] = await enter(LinkProxy(d.address))
            self.link_cables[id(sender), id(d)] = await enter(TcpProxy(link.address))
        for sender in self.workers:
            self._lead_links(sender)
        options = RouterOptions(port=0, local_prefill_tokens=self._local_prefill_tokens)
        self.router = fake_router(options, FakeControl())
        address = await self.router.start()
        self._stack.push_async_callback(self.router.stop)
        self.endpoints = endpoints
        await self.router.set_workers(endpoints)
        async with RawClient(address) as client:
            await client.wait_ready(WAIT_S)
        self.client_cable = await enter(TcpProxy(address))
        channel = grpc.aio.insecure_channel(self.client_cable.address, options=CHANNEL_OPTIONS)
        self.channel = await enter(channel)
        self._direct = generation_pb2_grpc.GenerationStub(
            await enter(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS))
        )
        self._generation = generation_pb2_grpc.GenerationStub(self.channel)

    def _lead_links(self, worker: Worker) -> None:
        """Its links go over cables of this scene."""
        sender = worker.server.node.sender
        send = sender.send
        cables = {
            self.to_worker[id(d)].address: self.link_cables[id(worker), id(d)].address
            for d in self.decodes
            if d is not worker
        }

        async def send_over_cable(
            progress: KvProgress, ticket: worker_pb2.KvTicket, address: str
        ) -> HandoffResult:
            return await send(progress, ticket, cables[address])

        sender.send = send_over_cable  # type: ignore[method-assign]  # of this one only

    # --- requests -----------------------------------------------------------------------------

    def ask(
        self,
        prompt: Sequence[int] = PROMPT,
        num_tokens: int = NUM_TOKENS,
        *,
        timeout_s: float | None = WAIT_S,
        direct: bool = False,
        cache_salt: str = "",
        request_id: str = "",
    ) -> Stream:
        """`direct`: past the cable that stands for the client's connection."""
        request = generation_pb2.GenerateRequest(sampling=sampling(num_tokens, ignore_eos=True))
        request.token_ids.ids.extend(prompt)
        request.cache_salt = cache_salt
        request.request_id = request_id
        stub = self._direct if direct else self._generation
        stream = Stream(stub.Generate(request, timeout=timeout_s))
        self.streams.append(stream)
        return stream

    async def bring(self, state: State, *, timeout_s: float | None = WAIT_S) -> Stream:
        """A request of PROMPT that stands in `state`, which is proven by `stands_in`."""
        others = 0
        if state is State.QUEUED:
            self._hold(self.prefills, 1)
            for number in range(len(self.prefills)):
                self.ask(OTHER_PROMPT, direct=True, cache_salt=str(number))
                await self.until(lambda n=number: self._num_inside(self.prefills) == n + 1)
            others = len(self.prefills)
        elif state is State.TICKETED:
            self._hold(self.prefills, 1)
            for number in range(len(self.prefills)):
                self.ask(OTHER_PROMPT, 1, direct=True, cache_salt=str(number))
                await self.until(lambda n=number: self._num_inside(self.prefills) == n + 1)
            others = len(self.prefills)
        elif state is State.PREFILLING:
            self._hold(self.prefills, HELD_PREFILL_STEP)
        elif state is State.DECODING:
            self._hold(self.decodes, HELD_DECODE_STEP)
        elif state is State.LOCAL_PREFILL:
            self._hold(self.decodes, 1)  # of two: such a step has fewer tokens than the prompt
        for link in self.links.values():
            link.gate_when = gate_of(state, self._rows_passed)
        stream = self.ask(timeout_s=timeout_s)
        await self.until(lambda: self.stands_in(state, stream) or stream.error is not None)
        assert self.stands_in(state, stream), f"not reached: {stream}"
        assert len(self.streams) == others + 1
        return stream

    def stands_in(self, state: State, stream: Stream) -> bool:
        """Whether the gauges of all sides say so."""
        if state is State.FINISHED:
            over = stream.reading.done() and stream.finish is not None
            sides = (self.prefills, self.decodes)
            cached = all(any(w.load().cached_blocks for w in side) for side in sides)
            return over and cached and all(map(is_free, self.workers))
        if stream.reading.done():
            return False
        ps = [worker.load() for worker in self.prefills]
        ds = [worker.load() for worker in self.decodes]
        num_tickets = sum(len(worker.server.node.tickets) for worker in self.decodes)
        num_inside = self._num_inside(self.prefills)
        received = sum(d.kv_bytes_received for d in ds)
        prefilled = sum(p.prefill_tokens for p in ps)
        match state:
            case State.QUEUED:
                return self.router.admission.num_queued == 1 and num_tickets == len(ps)
            case State.TICKETED:
                waiting = sum(p.waiting for p in ps)
                credit = sum(d.reserved_blocks for d in ds)
                return num_tickets == 1 and credit > 0 and waiting == 1 and prefilled == 0
            case State.PREFILLING:
                held = sum(p.held_blocks for p in ps)
                return (
                    num_tickets == 1
                    and num_inside == 1
                    and held > 0
                    and prefilled == PREFILL_CHUNK_TOKENS
                )
            case State.DECODING:
                steps = sum(d.decode_steps for d in ds)
                told = len(stream.tokens) == HELD_DECODE_STEP  # one of them is prefill's
                inside = self._num_inside(self.decodes) == 1
                return inside and told and steps == HELD_DECODE_STEP - 1
            case State.LOCAL_PREFILL:
                here = sum(d.held_blocks for d in ds)
                inside = self._num_inside(self.decodes) == 1
                return inside and here > 0 and prefilled == 0 and not stream.tokens
        landing = sum(d.transferring for d in ds) == 1 and len(stream.tokens) == 1
        held = all(sum(load.held_blocks for load in side) > 0 for side in (ps, ds))
        gated = any(link.num_waiting for link in self.links.values())
        rows = {
            State.BEFORE_ROWS: received == 0,
            State.AMID_ROWS: 0 < received < HANDOFF_BYTES,
            State.BEFORE_COMMIT: received == HANDOFF_BYTES,
        }[state]
        committed = sum(d.kv_transfers_completed for d in ds)
        return landing and held and gated and rows and not committed

    async def drain(self, worker: Worker) -> None:
        """As the controller does when it scales in."""
        worker_id = worker.server.worker_id
        self.endpoints = [
            replace(end, draining=end.draining or end.worker_id == worker_id)
            for end in self.endpoints
        ]
        await self.router.set_workers(self.endpoints)

    def _hold(self, workers: Sequence[Worker], step: int) -> None:
        for worker in workers:
            self.holds[id(worker)].arm(step)

    def _num_inside(self, workers: Sequence[Worker]) -> int:
        return sum(self.holds[id(worker)].is_inside for worker in workers)

    def release(self, *, but: Worker | None = None) -> None:
        """Steps and frames that are held go on, but those of one worker."""
        for worker in self.workers:
            if worker is not but:
                self.holds[id(worker)].release()
        for ends, link in self.links.items():
            if but is None or id(but) not in ends:
                link.gate_when = None
                link.gate.set()

    def release_steps(self, worker: Worker) -> None:
        self.holds[id(worker)].release()

    # --- what becomes of it -------------------------------------------------------------------

    def at_work(self, role: Role) -> Worker:
        """The worker of the role that has something of the request, or had it last."""
        if role == "decode":
            [worker] = [d for d in self.decodes if len(d.server.node.tickets)]
            return worker

        def share(worker: Worker) -> tuple[int, int]:
            load = worker.load()
            return load.held_blocks + load.waiting, load.prefill_tokens

        return max(self.prefills, key=share)

    async def until(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> float:
        """Seconds from the strike until it came true."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not within {timeout_s:g} s: {self.told()}")
            await asyncio.sleep(0.002)
        return time.monotonic() - self.struck_at_s

    def left_s(self, within_s: float) -> float:
        """Of a time since the strike."""
        return self.struck_at_s + within_s - time.monotonic()

    async def until_free(self, workers: Sequence[Worker], within_s: float) -> float:
        """Seconds from the strike until none of them holds anything: `within_s` at most."""
        took_s = await self.until(lambda: all(map(is_free, workers)), self.left_s(within_s))
        for worker in workers:
            worker.server.node.pool.check_integrity()
            load = worker.load()
            assert load.free_blocks + load.reserved_blocks + load.held_blocks == load.total_blocks
        return took_s

    async def until_router_free(self, within_s: float) -> None:
        router = self.router
        await self.until(
            lambda: router.num_in_flight == 0 and router.admission.num_queued == 0, within_s
        )
        await self.until(
            lambda: all(
                v.used_blocks == 0 and v.backlog_tokens == 0 and not v.calls
                for v in router.pool.views()
            )
        )

    def strike(self, stream: Stream, cause: str) -> None:
        """Ends it from its client's side: cancel, client gone or router gone."""
        self.struck_at_s = time.monotonic()
        match cause:
            case "cancel":
                stream.call.cancel()
            case "client gone":
                self.client_cable.cut()
            case "router gone":
                for cable in self.to_worker.values():
                    cable.cut()
            case _:
                raise ValueError(f"no such cause: {cause}")

    async def canary(self) -> None:
        """The next request has its exact answer, and leaves nothing."""
        await self.ask(OTHER_PROMPT, 8, direct=True).exact(OTHER_PROMPT)
        self.struck_at_s = time.monotonic()
        await self.until_free(self.workers, WAIT_S)

    def told(self) -> str:
        return "; ".join(str(w.load()).replace("\n", " ") for w in self.workers)


async def side_by_side(cases: Iterable[T], run: Callable[[T], Awaitable[object]]) -> None:
    """They wait most of the time. Whichever fails is named; what failed while this process was kept
    from its work is tried once more, alone.
    """
    turns = asyncio.Semaphore(MOST_AT_ONCE)
    again: list[T] = []

    async def one(case: T) -> None:
        async with turns:
            begun_s = time.monotonic()
            try:
                await run(case)
            except BaseException as error:
                error.add_note(str(case))
                if not isinstance(error, Exception) or not lag.was_late(begun_s):
                    raise
                print(f"{case}: tried once more, for the machine was too busy: {error!r}")
                again.append(case)

    async with loop_lag() as lag:
        async with asyncio.TaskGroup() as tasks:
            for case in cases:
                tasks.create_task(one(case))
        for case in again:
            await run(case)


def is_free(worker: Worker) -> bool:
    """It holds and promises nothing."""
    return (
        is_empty(worker.load())
        and not len(worker.server.node.tickets)
        and not len(worker.server.node.tickets._ledger)
        and not worker.server._lifecycle.num_calls
    )
