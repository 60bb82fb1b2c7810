"""Moving: one request whose answers move from decode worker to decode worker, a step at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc
from worker_pair import WAIT_S, Attempt, Pair, Worker

from legato.protos import common_pb2, worker_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.worker.commands import Park, Resume
    from legato.worker.flight import Flight
    from legato.worker.scheduling.step import Step


class StepGate:
    """Stops an engine inside one of its steps; the router's commands wait as well."""

    def __init__(self, worker: Worker) -> None:
        engine: Any = worker.server.node.engine
        self._worker = worker
        self._commands = engine._commands
        self._launch = engine._launch
        engine._launch = self._step
        self.step_s = 0.0  # that each takes longer
        self._num_left = 0
        self._is_inside = False
        self.go = threading.Event()
        self.go.set()

    def arm(self, step: int) -> None:
        """The step of that number from now on, from 1."""
        self._num_left = step
        self._is_inside = False
        self.go.clear()

    async def until_inside(self) -> None:
        """The engine stands in that step."""
        await self._worker.until(lambda _: self._is_inside)

    async def until_told(self, kind: type[Park] | type[Resume], count: int = 1) -> None:
        """So many commands of that kind wait for the engine, which stands still."""
        await self._worker.until(
            lambda _: sum(isinstance(c, kind) for c in self._commands._commands) == count
        )

    def _step(self, step: Step, before: Flight | None) -> Flight:
        time.sleep(self.step_s)
        flight: Flight = self._launch(step, before)
        if self._num_left and step.parts:
            self._num_left -= 1
            if self._num_left == 0:
                self._is_inside = True
                assert self.go.wait(60), "the test forgot to let the engine go"
        return flight


class Stay:
    """One answer's stay on one decode worker."""

    def __init__(self, worker: Worker, call: Any, number: int, index: int) -> None:  # noqa: ANN401  # gRPC's call
        """`number`: in the call; `index`: of the next token."""
        self.worker = worker
        self.call = call
        self.number = number
        self.index = index
        self.tokens: list[worker_pb2.SampledToken] = []
        self.is_over = False

    async def read(self) -> worker_pb2.DecodeEvent:
        """Of a call whose only answer this is."""
        event: Any = await self.call.read()
        assert event != grpc.aio.EOF, await self.call.details()
        if event.WhichOneof("event") == "tokens":
            self.take(event.tokens)
        return event  # type: ignore[no-any-return]  # gRPC's stubs

    def take(self, tokens: worker_pb2.Tokens) -> None:
        assert tokens.answer == self.number
        assert not self.is_over, "a token behind the last"
        for token in tokens.tokens:
            assert token.index == self.index, "an index is skipped or doubled"
            self.index += 1
            self.tokens.append(token)
        self.is_over = tokens.finished

    async def command(self, **fields: Any) -> None:  # noqa: ANN401  # the message's own
        await self.call.write(worker_pb2.DecodeCommand(**fields))

    async def pause(self, move: int = 1) -> None:
        await self.command(pause=worker_pb2.Pause(answer=self.number, number=move))

    async def resume(self, move: int = 1) -> None:
        await self.command(unpark=worker_pb2.Unpark(answer=self.number, number=move))

    async def parked(self, move: int = 1) -> worker_pb2.Parked | None:
        """None: it has ended instead."""
        async with asyncio.timeout(WAIT_S):
            while not self.is_over:
                event = await self.read()
                if event.WhichOneof("event") == "parked":
                    assert (event.parked.answer, event.parked.number) == (self.number, move)
                    return event.parked
        return None

    async def to_the_end(self) -> list[worker_pb2.SampledToken]:
        async with asyncio.timeout(WAIT_S):
            while not self.is_over:
                assert (await self.read()).WhichOneof("event") in ("tokens", "joined")
            assert await self.call.read() == grpc.aio.EOF
        return self.tokens


class Moving:
    """What the router knows of a request, and does."""

    def __init__(
        self,
        p: Worker,
        prompt: Sequence[int],
        params: common_pb2.SamplingParams,
        request_id: str = "r",
    ) -> None:
        self.p = p
        self.prompt = list(prompt)
        self.params = params
        self.request_id = request_id
        self.sampled: list[worker_pb2.SampledToken] = []
        self._attempts: list[Attempt] = []
        self.calls: list[Any] = []

    @property
    def tokens(self) -> list[int]:
        return [token.token_id for token in self.sampled]

    async def begin(self, d: Worker) -> Stay:
        """Up to Joined."""
        attempt = Attempt(Pair(self.p, d), self.prompt, self.params, request_id=self.request_id)
        self._attempts.append(attempt)
        await attempt.reserve()
        attempt.start_prefill()
        first = await attempt.first_token()
        self.sampled.append(first.answers[0].token)
        await attempt.start_decode()
        assert (await attempt.handoff()).WhichOneof("event") == "handoff_done"
        assert (await attempt.decode_call.read()).WhichOneof("event") == "joined"
        return Stay(d, attempt.decode_call, 0, 1)

    def note(self, stay: Stay) -> None:
        self.sampled += stay.tokens
        stay.tokens = []

    def reserve_message(self) -> worker_pb2.Reserve:
        """For the rows of all tokens but the last."""
        return worker_pb2.Reserve(
            key=worker_pb2.AttemptKey(request_id=self.request_id, attempt=len(self.calls) + 1),
            token_ids=[*self.prompt, *self.tokens[:-1]],
            num_prompt_tokens=len(self.prompt),
            sampling=self.params,
            priority=common_pb2.PRIORITY_INTERACTIVE,
            num_answers=1,
        )

    async def ticket(self, d: Worker) -> tuple[Any, worker_pb2.KvTicket]:
        call: Any = d.decode.Decode(timeout=WAIT_S)
        self.calls.append(call)
        await call.write(worker_pb2.DecodeCommand(reserve=self.reserve_message()))
        event = await call.read()
        assert event != grpc.aio.EOF, await call.details()
        return call, event.ticket

    async def move(
        self, stay: Stay, ticket: worker_pb2.KvTicket, address: str, move: int = 1
    ) -> None:
        await stay.command(
            move=worker_pb2.Move(
                answer=stay.number, number=move, ticket=ticket, decode_address=address
            )
        )

    async def go_on(self, d: Worker, call: Any) -> Stay:  # noqa: ANN401  # gRPC's call
        """With the last token, whose row is not among those that were sent."""
        start = worker_pb2.Start(
            answers=[worker_pb2.StartAnswer(answer=0, token_id=self.tokens[-1])]
        )
        await call.write(worker_pb2.DecodeCommand(start=start))
        return Stay(d, call, 0, len(self.sampled))

    async def moved(self, stay: Stay, d: Worker, move: int = 1) -> tuple[Stay, worker_pb2.Moved]:
        """From Parked on; the stay that it goes on with."""
        self.note(stay)
        call, ticket = await self.ticket(d)
        await self.move(stay, ticket, d.address, move)
        event = await stay.read()
        assert event.WhichOneof("event") == "moved", event
        return await self.go_on(d, call), event.moved

    def close(self) -> None:
        for attempt in self._attempts:
            attempt.close()
        for call in self.calls:
            call.cancel()
