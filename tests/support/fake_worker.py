"""FakeWorker: an in-process gRPC worker with a scripted model, delays, capacity and faults."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import TYPE_CHECKING, Any

import grpc
from fake_attempts import Attempt, Running, Target
from fake_faults import Faults

from legato.cluster.control_plane import Role, WorkerEndpoint
from legato.protos import common_pb2, worker_pb2, worker_pb2_grpc
from legato.protos.kv_lapsed import KV_LAPSED
from legato.protos.never_retry import NEVER_RETRY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

KV_BYTES_PER_TOKEN = 8
ROLE_NUMBERS = {
    "prefill": common_pb2.WORKER_ROLE_PREFILL,
    "decode": common_pb2.WORKER_ROLE_DECODE,
    "colocated": common_pb2.WORKER_ROLE_COLOCATED,
}
# Where a fake prefill worker finds the decode worker that a ticket names.
BY_ADDRESS: dict[str, FakeWorker] = {}


SEED = 3  # of the tests' requests


def scripted_token(prompt: list[int], index: int, seed: int = SEED) -> int:
    """A letter that depends on the prompt, on the position in the answer and on the seed."""
    return ord("a") + (sum(prompt) + 7 * index + (seed - SEED) * (index + 3)) % 26


class FakeWorker(
    worker_pb2_grpc.PrefillWorkerServicer,
    worker_pb2_grpc.DecodeWorkerServicer,
    worker_pb2_grpc.WorkerControlServicer,
):
    """Holds blocks exactly as long as a call is open, like a real one."""

    _ids = itertools.count(1)

    def __init__(
        self,
        role: Role,
        *,
        total_blocks: int = 64,
        block_size: int = 4,
        prefill_s: float = 0.0,
        handoff_s: float = 0.0,
        step_s: float = 0.0,
        tokens_per_event: int = 1,
        eos_at: int | None = None,
    ) -> None:
        self.role: Role = role
        self.worker_id = f"{role}-{next(self._ids)}"
        self.total_blocks, self.block_size = total_blocks, block_size
        self.prefill_s, self.handoff_s, self.step_s = prefill_s, handoff_s, step_s
        self.tokens_per_event, self.eos_at = tokens_per_event, eos_at
        self.fingerprint, self.dtype, self.num_kv_heads = "f1", "float32", 1
        self.weights, self.kv_dtype, self.kv_wire = "float32", "float32", "same"
        self.protocol_version = 5
        self.faults = Faults()
        self.phase: common_pb2.WorkerPhase.ValueType = common_pb2.WORKER_PHASE_READY
        self.reused_tokens = 0  # rows of a hand-off that are said to be there already
        self.cached_tokens = 0  # of each prompt, by this worker's word
        self.local_prefill_token_s = 0.0
        self.keep_s = 5.0  # KV whose decode worker was lost
        self.retargets: list[worker_pb2.Retarget] = []
        self.starts: list[worker_pb2.Start] = []
        self.open_calls = 0
        self.prefills: list[worker_pb2.PrefillRequest] = []
        self.reserves: list[worker_pb2.Reserve] = []
        self.stops: list[int] = []
        self.num_parked = 0
        self.num_resumed = 0
        self.num_moved = 0
        self.num_tokens_sent = 0
        self.num_reports = 0
        self.address = ""
        self._epochs = itertools.count(1)
        self._attempts: dict[int, Attempt] = {}  # by epoch
        self._prefilling_blocks = 0
        self._going = asyncio.Event()  # cleared: the worker hangs
        self._going.set()
        self.reporting = asyncio.Event()  # cleared: no load reports
        self.reporting.set()
        self._server = grpc.aio.server(
            options=(
                ("grpc.http2.min_ping_interval_without_data_ms", 0),
                ("grpc.http2.max_ping_strikes", 0),
            )
        )
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self, self._server)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self, self._server)
        worker_pb2_grpc.add_WorkerControlServicer_to_server(self, self._server)

    @property
    def used_blocks(self) -> int:
        """Of all calls that are open."""
        decoding = sum(a.num_blocks(self.block_size) for a in self._attempts.values())
        return self._prefilling_blocks + decoding

    async def start(self) -> WorkerEndpoint:
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        BY_ADDRESS[self.address] = self
        await self._server.start()
        return self.endpoint()

    def endpoint(self, *, draining: bool = False) -> WorkerEndpoint:
        return WorkerEndpoint(self.worker_id, self.role, self.address, draining)

    async def die(self) -> None:
        """Every call breaks, nothing answers any more."""
        BY_ADDRESS.pop(self.address, None)
        await self._server.stop(grace=None)

    def hang(self) -> None:
        """Connections stay, nothing moves; load reports stop."""
        self._going.clear()

    def resume(self) -> None:
        self._going.set()

    # --- prefill ------------------------------------------------------------------------------

    async def Prefill(  # noqa: N802
        self,
        request_iterator: AsyncIterator[worker_pb2.PrefillCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[worker_pb2.PrefillEvent]:
        request = (await anext(request_iterator)).request
        self.prefills.append(request)
        target = Target(request.ticket, request.decode_address, self.retargets)
        listening = asyncio.create_task(target.follow(request_iterator))
        blocks = -(-len(request.token_ids) // self.block_size)
        self.open_calls += 1
        self._prefilling_blocks += blocks
        try:
            await self._pause(self.prefill_s)
            if self.faults.fail_prefills > 0:
                self.faults.fail_prefills -= 1
                await context.abort(grpc.StatusCode.INTERNAL, "the engine raised")
            index = len(request.token_ids) - request.num_prompt_tokens
            if index == self.faults.break_at:
                await context.abort(grpc.StatusCode.INTERNAL, "NaN", (NEVER_RETRY,))
            first = self._first_token(request, request.num_answers)
            yield worker_pb2.PrefillEvent(first_token=first)
            if first.answers[0].finished or not request.HasField("ticket"):
                return
            while True:
                event = await self._hand_off(request, target)
                yield event
                if not event.handoff_failed.decode_lost:
                    return
                try:
                    async with asyncio.timeout(self.keep_s):
                        while event.handoff_failed.num_retargets == target.num_retargets:
                            target.changed.clear()
                            await target.changed.wait()
                except TimeoutError:
                    return
        finally:
            listening.cancel()
            self._prefilling_blocks -= blocks
            self.open_calls -= 1

    def _first_token(
        self, request: worker_pb2.PrefillRequest | worker_pb2.Reserve, num_answers: int
    ) -> worker_pb2.FirstToken:
        index = len(request.token_ids) - request.num_prompt_tokens
        finish = self._finish_reason(index, request.sampling)
        first = worker_pb2.FirstToken(
            wait_s=0.001, model_s=0.002, prefill_forwards=1, cached_tokens=self.cached_tokens
        )
        for answer in range(num_answers):
            first.answers.add(
                token=self._sample(request, index, request.sampling.seed + answer),
                finished=finish != common_pb2.FINISH_REASON_UNSPECIFIED,
                finish_reason=finish,
            )
        if request.sampling.HasField("prompt_logprobs"):
            count = request.sampling.prompt_logprobs
            first.prompt_logprobs.SetInParent()
            for place in range(1, request.num_prompt_tokens - self.faults.lose_scores):
                first.prompt_logprobs.logprobs.append(-math.inf if place == 2 else -place)
                first.prompt_logprobs.top_logprobs.extend(-rank for rank in range(count))
                first.prompt_logprobs.top_token_ids.extend(place + rank for rank in range(count))
        return first

    async def _hand_off(
        self, request: worker_pb2.PrefillRequest, target: Target
    ) -> worker_pb2.PrefillEvent:
        """One to a worker that is gone tells of it; a Retarget begins anew."""
        await self._pause(self.handoff_s)
        while (  # noqa: ASYNC110  # a plain flag is easier on tests
            self.faults.hold_handoff and target.address in BY_ADDRESS
        ):
            await asyncio.sleep(0.005)
        if self.faults.late_retarget:
            self.faults.late_retarget = False
            await target.changed.wait()
            return worker_pb2.PrefillEvent(handoff_done=worker_pb2.HandoffDone())
        count = target.num_retargets
        failed = worker_pb2.HandoffFailed(num_retargets=count)
        if self.faults.fail_handoffs > 0:
            self.faults.fail_handoffs -= 1
            failed.reason = "the link broke"
            return worker_pb2.PrefillEvent(handoff_failed=failed)
        if self.faults.cut_handoffs > 0:
            self.faults.cut_handoffs -= 1
            failed.decode_lost, failed.reason = True, "the decode worker answers nothing"
            return worker_pb2.PrefillEvent(handoff_failed=failed)
        decode = BY_ADDRESS.get(target.address)
        attempt = decode._attempts.get(target.ticket.epoch) if decode is not None else None
        if decode is not None and decode.worker_id in self.faults.out_of_reach:
            failed.decode_lost, failed.reason = True, "Connection refused"
            return worker_pb2.PrefillEvent(handoff_failed=failed)
        if decode is not None and decode.worker_id in self.faults.refused_by:
            failed.decode_lost, failed.refused = True, True
            failed.reason = "kv_wire is 'int8'\x00\x1b[31m"
            return worker_pb2.PrefillEvent(handoff_failed=failed)
        if attempt is None or decode is None:
            failed.decode_lost, failed.reason = True, "no such ticket"
            return worker_pb2.PrefillEvent(handoff_failed=failed)
        assert attempt.reserve.token_ids == request.token_ids, "the KV is another's"
        assert attempt.reserve.key == target.ticket.key
        attempt.landed.set()
        return worker_pb2.PrefillEvent(
            handoff_done=worker_pb2.HandoffDone(
                kv_bytes=len(request.token_ids) * KV_BYTES_PER_TOKEN,
                transfer_s=0.003,
                reused_tokens=decode.reused_tokens,
                num_retargets=count,
            )
        )

    # --- decode -------------------------------------------------------------------------------

    async def Decode(  # noqa: N802
        self,
        request_iterator: AsyncIterator[worker_pb2.DecodeCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[worker_pb2.DecodeEvent]:
        self.open_calls += 1
        epoch = next(self._epochs)
        listening: asyncio.Task[None] | None = None
        try:
            attempt = Attempt((await anext(request_iterator)).reserve)
            self.reserves.append(attempt.reserve)
            await self._check_room(attempt, context)
            self._attempts[epoch] = attempt
            await self._pause(0)
            yield worker_pb2.DecodeEvent(
                ticket=worker_pb2.KvTicket(
                    key=attempt.reserve.key,
                    epoch=epoch,
                    worker_id=self.worker_id,
                    blocks=attempt.num_blocks(self.block_size),
                    cached_tokens=self.cached_tokens,
                )
            )
            start = (await anext(request_iterator)).start
            self.starts.append(start)
            listening = asyncio.create_task(self._listen(request_iterator, attempt))
            if start.local_prefill:
                assert attempt.reserve.num_answers == 1
                assert not start.answers
                await self._pause(self.prefill_s)
                first = self._first_token(attempt.reserve, 1)
                yield worker_pb2.DecodeEvent(first_token=first)
                if first.answers[0].finished:
                    return
                token_id = first.answers[0].token.token_id
                start = worker_pb2.Start(answers=[worker_pb2.StartAnswer(token_id=token_id)])
            elif self.faults.lapses:
                self.faults.lapses.pop()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "no KV came", (KV_LAPSED,))
            else:
                await attempt.landed.wait()
            while self.faults.hold_joining:  # noqa: ASYNC110  # a plain flag is easier on tests
                await asyncio.sleep(0.005)
            await self._pause(0)
            yield worker_pb2.DecodeEvent(joined=worker_pb2.Joined())
            async for event in self._steps(start, attempt):
                yield event
            if self.faults.break_at is not None:
                await context.abort(grpc.StatusCode.INTERNAL, "NaN", (NEVER_RETRY,))
        finally:
            if listening is not None:
                listening.cancel()
            self._attempts.pop(epoch, None)
            self.open_calls -= 1

    async def _check_room(
        self, attempt: Attempt, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        if self.faults.refuse_reserves > 0:
            self.faults.refuse_reserves -= 1
            await context.abort(self.faults.refusal_code, "not now")
        reserve = attempt.reserve
        rows = reserve.num_prompt_tokens + reserve.sampling.max_tokens - 1
        if self.faults.refuse_rows is not None and rows >= self.faults.refuse_rows:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "expected to grow too large")
        blocks = attempt.num_blocks(self.block_size)
        if -(-rows // self.block_size) > self.total_blocks:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "can never fit")
        if blocks > self.total_blocks - self.used_blocks:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no blocks free")

    async def _listen(
        self, commands: AsyncIterator[worker_pb2.DecodeCommand], attempt: Attempt
    ) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "pause":
                    attempt.pauses[command.pause.answer] = command.pause.number
                case "move":
                    attempt.moves[command.move.answer] = command.move
                case "unpark":
                    answer = command.unpark.answer
                    if attempt.pauses.get(answer) == command.unpark.number:
                        self.num_resumed += 1
                        del attempt.pauses[answer]
                        attempt.parked.discard(answer)
                        attempt.moves.pop(answer, None)
                case _:
                    self.stops.append(command.stop.answer)
                    attempt.stopped.add(command.stop.answer)

    async def _steps(
        self, start: worker_pb2.Start, attempt: Attempt
    ) -> AsyncIterator[worker_pb2.DecodeEvent]:
        reserve = attempt.reserve
        index = len(reserve.token_ids) - reserve.num_prompt_tokens + 1
        running: dict[int, Running] = {}
        for item in start.answers:
            seed = reserve.sampling.seed + item.answer
            assert item.token_id == self._sample(reserve, index - 1, seed).token_id
            running[item.answer] = Running(index, seed)
        while running:
            await self._pause(max(self.step_s, 0.001 if attempt.pauses else 0))
            for number, answer in tuple(running.items()):
                if number in attempt.stopped:
                    del running[number]
                    continue
                if number in attempt.pauses and not self.faults.hold_parking:
                    for event in self._move_step(attempt, number, answer):
                        yield event
                        if event.HasField("moved"):
                            del running[number]
                    continue
                index = answer.index
                if index in (self.faults.end_at, self.faults.break_at):
                    return
                if index == self.faults.cut_short_at:
                    self.faults.cut_short_at = None
                    cut = worker_pb2.Tokens(
                        answer=number,
                        finished=True,
                        finish_reason=common_pb2.FINISH_REASON_CANCELLED,
                    )
                    yield worker_pb2.DecodeEvent(tokens=cut)
                    return
                if index in self.faults.preempt_at.get(answer.seed, ()):
                    self.faults.preempt_at[answer.seed].remove(index)
                    self.faults.refuse_reserves += self.faults.refuse_after_preemption
                    del running[number]
                    if answer.batch:
                        yield worker_pb2.DecodeEvent(tokens=self._tokens(number, answer))
                    left = worker_pb2.Preempted(
                        answer=number,
                        num_preemptions=reserve.num_preemptions + self.faults.swaps + 1,
                    )
                    yield worker_pb2.DecodeEvent(preempted=left)
                    continue
                finish = self._finish_reason(index, reserve.sampling)
                finished = finish != common_pb2.FINISH_REASON_UNSPECIFIED
                answer.forwards += 1
                answer.index += 1
                attempt.num_tokens[number] = attempt.num_tokens.get(number, 0) + 1
                if index != self.faults.skip_index:
                    answer.batch.append(self._sample(reserve, index, answer.seed))
                if finished and self.faults.lose_finish:
                    yield worker_pb2.DecodeEvent(tokens=self._tokens(number, answer))
                    return
                if finished or len(answer.batch) >= self.tokens_per_event:
                    tokens = self._tokens(number, answer)
                    tokens.finished, tokens.finish_reason = finished, finish
                    yield worker_pb2.DecodeEvent(tokens=tokens)
                if finished:
                    del running[number]

    def _move_step(
        self, attempt: Attempt, number: int, answer: Running
    ) -> Iterator[worker_pb2.DecodeEvent]:
        """Of an answer that is to be parked, or is."""
        move = attempt.pauses[number]
        num_rows = attempt.reserve.num_prompt_tokens + answer.index - 1
        if number not in attempt.parked:
            attempt.parked.add(number)
            self.num_parked += 1
            if answer.batch:
                yield worker_pb2.DecodeEvent(tokens=self._tokens(number, answer))
            parked = worker_pb2.Parked(answer=number, number=move)
            parked.num_rows = num_rows + self.faults.extra_rows
            yield worker_pb2.DecodeEvent(parked=parked)
            return
        command = attempt.moves.get(number)
        if command is None or self.faults.hold_moves:
            return
        del attempt.moves[number]
        target = BY_ADDRESS.get(command.decode_address)
        landing = target._attempts.get(command.ticket.epoch) if target is not None else None
        failed = worker_pb2.MoveFailed(answer=number, number=move)
        if self.faults.cut_moves > 0:
            self.faults.cut_moves -= 1
            failed.reason = "the link broke"
            yield worker_pb2.DecodeEvent(move_failed=failed)
        elif landing is None:
            failed.reason, failed.refused = "no such ticket", True
            yield worker_pb2.DecodeEvent(move_failed=failed)
        else:
            assert len(landing.reserve.token_ids) == num_rows, "rows of another number"
            landing.landed.set()
            self.num_moved += 1
            moved = worker_pb2.Moved(
                answer=number,
                number=move,
                kv_bytes=num_rows * KV_BYTES_PER_TOKEN,
                transfer_s=0.002,
            )
            yield worker_pb2.DecodeEvent(moved=moved)

    def _tokens(self, number: int, answer: Running) -> worker_pb2.Tokens:
        batch, answer.batch = answer.batch, []
        self.num_tokens_sent += len(batch)
        return worker_pb2.Tokens(
            answer=number,
            tokens=batch,
            decode_forwards=answer.forwards,
            model_s=answer.forwards * 0.001,
            swaps=self.faults.swaps,
        )

    # --- control ------------------------------------------------------------------------------

    async def GetIdentity(  # noqa: N802
        self, request: worker_pb2.GetIdentityRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.WorkerIdentity:
        return worker_pb2.WorkerIdentity(
            worker_id=self.worker_id,
            role=ROLE_NUMBERS[self.role],
            model_fingerprint=self.fingerprint,
            weights=self.weights,
            kv_wire=self.kv_wire,
            dtype=self.dtype,
            kv_layout=worker_pb2.KvLayout(
                num_layers=2,
                num_kv_heads=self.num_kv_heads,
                head_dim=4,
                block_size=self.block_size,
                dtype=self.kv_dtype,
            ),
            total_blocks=self.total_blocks,
            context_length=512,
            vocab_size=320,
            architecture="fake",
            pid=1,
            host="here",
            protocol_version=self.protocol_version,
        )

    async def WatchLoad(  # noqa: N802
        self, request: worker_pb2.WatchLoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.WorkerReport]:
        while True:
            await self._going.wait()
            await self.reporting.wait()
            if self.faults.break_reports:
                self.faults.break_reports -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "ping timeout")
            self.num_reports += 1
            yield worker_pb2.WorkerReport(
                phase=self.phase,
                load=common_pb2.WorkerLoad(
                    total_blocks=self.total_blocks,
                    free_blocks=self.total_blocks - self.used_blocks,
                    held_blocks=self.used_blocks,
                    running=self.open_calls,
                    local_prefill_token_s=self.local_prefill_token_s,
                ),
            )
            await asyncio.sleep(0.02)

    async def Drain(  # noqa: N802
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DrainResponse:
        self.phase = common_pb2.WORKER_PHASE_DRAINING
        return worker_pb2.DrainResponse()

    # --- the model ----------------------------------------------------------------------------

    def _sample(
        self, request: worker_pb2.PrefillRequest | worker_pb2.Reserve, index: int, seed: int
    ) -> worker_pb2.SampledToken:
        prompt = list(request.token_ids[: request.num_prompt_tokens])
        token = worker_pb2.SampledToken(token_id=scripted_token(prompt, index, seed), index=index)
        if request.sampling.HasField("logprobs"):
            token.logprobs.logprob = -float(index)
        return token

    def _finish_reason(
        self, index: int, sampling: common_pb2.SamplingParams
    ) -> common_pb2.FinishReason.ValueType:
        if index == self.eos_at:
            return common_pb2.FINISH_REASON_STOP
        if index + 1 == sampling.max_tokens:
            return common_pb2.FINISH_REASON_LENGTH
        return common_pb2.FINISH_REASON_UNSPECIFIED

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._going.wait()
