"""PrefillCall, DecodeCall: one attempt's calls to its workers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, TypeVar

import grpc

from legato.cluster.attempt_errors import (
    AttemptEndedError,
    WorkerFailedError,
    WorkerFaultError,
    meaning_of,
)
from legato.cluster.cancellation import check_cancellation
from legato.cluster.worker_view import ViewState
from legato.protos import common_pb2, worker_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from legato.cluster.metrics.request_trace import CallSpan, RequestTrace
    from legato.cluster.worker_view import WorkerView

    AnswerEvent = (
        worker_pb2.Tokens
        | worker_pb2.Preempted
        | worker_pb2.Parked
        | worker_pb2.Moved
        | worker_pb2.MoveFailed
    )

T = TypeVar("T")
# A worker that has not taken note of the last `Stop` by then frees all by the call's end.
STOP_TIMEOUT_S = 1.0


def _check_there(view: WorkerView) -> None:
    # A call that begins after the loss is one that the loss does not end; and a channel that is
    # closed takes none.
    if view.state in (ViewState.LOST, ViewState.CLOSED):
        raise WorkerFailedError(view, view.lost_reason, gone=True)


def _begin_span(
    trace: RequestTrace | None, view: WorkerView, service: str, method: str
) -> CallSpan | None:
    return None if trace is None else trace.call(service, method, view.worker_id)


def _metadata(view: WorkerView, span: CallSpan | None) -> tuple[tuple[str, str], ...]:
    """That of every call to the worker, and what joins this one to its trace."""
    return view.metadata if span is None else (*view.metadata, *span.metadata)


class _Call:
    """A call that ends when its worker is lost, and says so."""

    def __init__(self, view: WorkerView, call: grpc.aio.Call, span: CallSpan | None) -> None:
        self.view = view
        self._base = call
        self._span = span
        self._cancelled = asyncio.Event()
        view.calls.add(self)

    def close(self) -> None:
        """Cancels the call unless it is over: the worker frees what it holds. Idempotent."""
        self.view.calls.discard(self)
        self.cancel()
        if self._span is not None:
            self._span.end()

    def cancel(self) -> None:
        """The worker is lost: whoever waits for the call is told."""
        self._cancelled.set()
        self._base.cancel()

    async def _unless_cancelled(self, first: Awaitable[None]) -> None:
        """The first write. Where a call is cancelled before it has begun, gRPC never wakes the one
        who waits to write.
        """
        writing = asyncio.ensure_future(first)
        cancelled = asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait({writing, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                raise asyncio.CancelledError
            writing.result()
        finally:
            cancelled.cancel()
            if not writing.cancel() and not writing.cancelled():
                writing.exception()  # seen, also where this task is cancelled

    def _check(
        self, event: worker_pb2.PrefillEvent | worker_pb2.DecodeEvent, *expected: str
    ) -> None:
        if event.WhichOneof("event") not in expected:
            raise WorkerFaultError(
                f"worker {self.view.worker_id} sent {event.WhichOneof('event')}, "
                f"expected {' or '.join(expected)}"
            )

    def _first_token(
        self, event: worker_pb2.PrefillEvent | worker_pb2.DecodeEvent, num_answers: int
    ) -> worker_pb2.FirstToken:
        first = event.first_token
        if len(first.answers) != num_answers:
            raise WorkerFaultError(
                f"worker {self.view.worker_id} began {len(first.answers)} answers "
                f"where {num_answers} were asked for"
            )
        if any(a.finish_reason == common_pb2.FINISH_REASON_CANCELLED for a in first.answers):
            raise WorkerFailedError(self.view, "it ended the sequence early")
        return first

    async def _guard(self, step: Awaitable[T]) -> T:
        """Awaits one read or write; turns what may go wrong into what `meaning_of` says."""
        try:
            return await self._explain(step)
        except AttemptEndedError as error:
            if self._span is not None:
                self._span.fail(error.reason)
            raise
        finally:
            check_cancellation()

    async def _explain(self, step: Awaitable[T]) -> T:
        try:
            return await step
        except grpc.aio.AioRpcError as error:
            raise meaning_of(
                self.view, error.code(), error.details(), error.trailing_metadata()
            ) from None
        except asyncio.InvalidStateError:  # a write after the call ended
            if self._cancelled.is_set():
                raise self._lost() from None
            code, details = await self._base.code(), await self._base.details()
            trailers = await self._base.trailing_metadata()
            raise meaning_of(self.view, code, details, trailers) from None
        except asyncio.CancelledError:  # of the call, or of this task: `_guard` knows
            raise self._lost() from None

    def _lost(self) -> WorkerFailedError:
        """The view lost its worker and cancelled the call, or the worker's server did."""
        reason = self.view.lost_reason or "the worker cancelled the call"
        return WorkerFailedError(self.view, reason, gone=True)


class PrefillCall(_Call):
    """The prompt's way through a prefill worker, and its KV's way out of it."""

    def __init__(
        self, view: WorkerView, timeout_s: float, trace: RequestTrace | None = None
    ) -> None:
        """Raises WorkerFailedError where the worker was lost since it was chosen."""
        _check_there(view)
        span = _begin_span(trace, view, "PrefillWorker", "Prefill")
        self._call = view.prefill.Prefill(timeout=timeout_s, metadata=_metadata(view, span))
        super().__init__(view, self._call, span)

    async def begin(self, request: worker_pb2.PrefillRequest) -> None:
        """Raises:
        WorkerFailedError: lost.
        """
        writing = self._call.write(worker_pb2.PrefillCommand(request=request))
        await self._guard(self._unless_cancelled(writing))

    async def retarget(self, ticket: worker_pb2.KvTicket, address: str) -> None:
        """The KV is to go to another decode worker. Where this one is lost, or was done, the next
        `handoff` says so.
        """
        retarget = worker_pb2.Retarget(ticket=ticket, decode_address=address)
        with contextlib.suppress(AttemptEndedError, WorkerFaultError):
            await self._guard(self._call.write(worker_pb2.PrefillCommand(retarget=retarget)))

    async def first_token(self, num_answers: int) -> worker_pb2.FirstToken:
        """Waits for the prompt's turn and its forward pass; a token for each of the answers.

        Raises:
            WorkerFailedError: lost, or it ended an answer early.
        """
        return self._first_token(await self._next("first_token"), num_answers)

    async def handoff(self) -> worker_pb2.HandoffDone | worker_pb2.HandoffFailed | None:
        """What comes next of the hand-off; None: the worker has ended the call, all is well with it
        but it holds the KV no more.

        Raises:
            WorkerFailedError: lost.
        """
        event = await self._guard(self._call.read())
        if not isinstance(event, worker_pb2.PrefillEvent):
            return None
        self._check(event, "handoff_done", "handoff_failed")
        return event.handoff_done if event.HasField("handoff_done") else event.handoff_failed

    async def _next(self, *expected: str) -> worker_pb2.PrefillEvent:
        event = await self._guard(self._call.read())
        if not isinstance(event, worker_pb2.PrefillEvent):
            raise WorkerFailedError(self.view, f"its stream ended before {expected[0]}")
        self._check(event, *expected)
        return event


class DecodeCall(_Call):
    """The whole life of one attempt on a decode worker: credit, KV, tokens."""

    def __init__(
        self, view: WorkerView, timeout_s: float, trace: RequestTrace | None = None
    ) -> None:
        """Raises WorkerFailedError where the worker was lost since it was chosen."""
        _check_there(view)
        span = _begin_span(trace, view, "DecodeWorker", "Decode")
        self._call = view.decode.Decode(timeout=timeout_s, metadata=_metadata(view, span))
        self._turn = asyncio.Lock()  # to write: gRPC takes one message at a time
        self._saying: set[asyncio.Task[None]] = set()
        super().__init__(view, self._call, span)

    async def reserve(self, reserve: worker_pb2.Reserve) -> worker_pb2.KvTicket:
        """Takes a credit of KV blocks.

        Raises:
            NoRoomError: not free now.
            RefusedError: can never fit, or draining.
            WorkerFailedError: lost.
        """
        writing = self._call.write(worker_pb2.DecodeCommand(reserve=reserve))
        await self._guard(self._unless_cancelled(writing))
        return (await self._next("ticket")).ticket

    async def start(self, first_tokens: Mapping[int, int]) -> None:
        """Sends the answers that go on, by their number, with their first token."""
        start = worker_pb2.Start(
            answers=[
                worker_pb2.StartAnswer(answer=number, token_id=token_id)
                for number, token_id in first_tokens.items()
            ]
        )
        await self._guard(self._call.write(worker_pb2.DecodeCommand(start=start)))

    async def start_locally(self) -> worker_pb2.FirstToken:
        """The worker is to compute the prompt itself; waits for its only answer's first token.

        Raises:
            WorkerFailedError: lost, or it ended the answer early.
        """
        start = worker_pb2.Start(local_prefill=True)
        await self._guard(self._call.write(worker_pb2.DecodeCommand(start=start)))
        return self._first_token(await self._next("first_token"), 1)

    async def joined(self) -> None:
        """Waits until the first of the answers is in the batch."""
        await self._next("joined")

    async def stop(self, number: int) -> None:
        """No more of this answer. Where the worker is lost, or was done, the next read says so."""
        stop = worker_pb2.DecodeCommand(stop=worker_pb2.Stop(answer=number))
        with contextlib.suppress(AttemptEndedError, WorkerFaultError):
            async with self._turn:
                await self._guard(self._call.write(stop))

    # Of a move; said soon, in order. Where the worker is lost the next read says so.

    def pause(self, number: int, move: int) -> None:
        """The answer is to leave the batch."""
        self._say(worker_pb2.DecodeCommand(pause=worker_pb2.Pause(answer=number, number=move)))

    def move(self, number: int, move: int, ticket: worker_pb2.KvTicket, address: str) -> None:
        """The parked answer's KV is to go there."""
        command = worker_pb2.Move(answer=number, number=move, ticket=ticket, decode_address=address)
        self._say(worker_pb2.DecodeCommand(move=command))

    def resume(self, number: int, move: int) -> None:
        """It goes on there after all."""
        self._say(worker_pb2.DecodeCommand(unpark=worker_pb2.Unpark(answer=number, number=move)))

    def _say(self, command: worker_pb2.DecodeCommand) -> None:
        """Not by the caller's task: gRPC ends a call whose writer is cancelled."""
        if self._cancelled.is_set():
            return
        saying = asyncio.create_task(self._say_in_turn(command))
        self._saying.add(saying)
        saying.add_done_callback(self._saying.discard)

    async def _say_in_turn(self, command: worker_pb2.DecodeCommand) -> None:
        with contextlib.suppress(AttemptEndedError, WorkerFaultError):
            async with self._turn:
                await self._guard(self._call.write(command))

    async def end(self) -> None:
        """After the last `stop`: waits, not for long, until the worker has taken note of it."""
        with contextlib.suppress(AttemptEndedError, WorkerFaultError, TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._guard(self._call.done_writing())
                while await self._guard(self._call.read()) is not grpc.aio.EOF:
                    pass
        self.close()

    async def next_of_answer(self) -> AnswerEvent:
        """What comes next of any of the answers: tokens of one step or more, that it left, or a
        word on its move.
        """
        event = await self._next("tokens", "preempted", "parked", "moved", "move_failed")
        content: AnswerEvent = getattr(event, event.WhichOneof("event") or "")
        return content

    async def _next(self, *expected: str) -> worker_pb2.DecodeEvent:
        event = await self._guard(self._call.read())
        if not isinstance(event, worker_pb2.DecodeEvent):
            raise WorkerFailedError(self.view, f"its stream ended before {expected[0]}")
        self._check(event, *expected)
        return event
