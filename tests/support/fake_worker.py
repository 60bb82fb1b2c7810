"""FakeWorker: an in-process gRPC worker with a scripted model, delays, capacity and faults."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from legato.cluster.control_plane import Role, WorkerEndpoint
from legato.protos import common_pb2, worker_pb2, worker_pb2_grpc
from legato.protos.never_retry import NEVER_RETRY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KV_BYTES_PER_TOKEN = 8
ROLE_NUMBERS = {
    "prefill": common_pb2.WORKER_ROLE_PREFILL,
    "decode": common_pb2.WORKER_ROLE_DECODE,
}
# Where a fake prefill worker finds the decode worker that a ticket names.
BY_ADDRESS: dict[str, FakeWorker] = {}


def scripted_token(prompt: list[int], index: int) -> int:
    """A letter that depends on the prompt and on the position in the answer."""
    return ord("a") + (sum(prompt) + 7 * index) % 26


@dataclass
class Faults:
    """What goes wrong; all off at first."""

    refuse_reserves: int = 0  # answers to so many Reserves: RESOURCE_EXHAUSTED
    refusal_code: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED
    fail_prefills: int = 0  # so many prefills: INTERNAL before the first token
    fail_handoffs: int = 0  # so many hand-offs: HandoffFailed by this prefill worker
    skip_index: int | None = None  # decode leaves this token out
    end_at: int | None = None  # decode ends its stream, without an error, before this token
    hold_handoff: bool = False  # the KV never arrives
    lose_finish: bool = False  # decode sends every token, and never the word that it was the end
    break_at: int | None = None  # no usable logits for this token, in prefill or decode
    cut_short_at: int | None = None  # decode finishes as CANCELLED before this token


@dataclass
class Sequence:
    """One attempt on a decode worker."""

    blocks: int
    landed: asyncio.Event = field(default_factory=asyncio.Event)


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
        self.weights = "float32"
        self.protocol_version = 1
        self.faults = Faults()
        self.phase: common_pb2.WorkerPhase.ValueType = common_pb2.WORKER_PHASE_READY
        self.used_blocks = 0
        self.open_calls = 0
        self.prefills: list[worker_pb2.PrefillRequest] = []
        self.reserves: list[worker_pb2.Reserve] = []
        self.num_tokens_sent = 0
        self.address = ""
        self._epochs = itertools.count(1)
        self._sequences: dict[int, Sequence] = {}
        self._going = asyncio.Event()  # cleared: the worker hangs
        self._going.set()
        self._server = grpc.aio.server(
            options=(
                ("grpc.http2.min_ping_interval_without_data_ms", 0),
                ("grpc.http2.max_ping_strikes", 0),
            )
        )
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self, self._server)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self, self._server)
        worker_pb2_grpc.add_WorkerControlServicer_to_server(self, self._server)

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
        self, request: worker_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.PrefillEvent]:
        self.prefills.append(request)
        blocks = -(-len(request.token_ids) // self.block_size)
        self.open_calls += 1
        self.used_blocks += blocks
        try:
            await self._pause(self.prefill_s)
            if self.faults.fail_prefills > 0:
                self.faults.fail_prefills -= 1
                await context.abort(grpc.StatusCode.INTERNAL, "the engine raised")
            prompt = list(request.token_ids[: request.num_prompt_tokens])
            index = len(request.token_ids) - request.num_prompt_tokens
            if index == self.faults.break_at:
                await context.abort(grpc.StatusCode.INTERNAL, "NaN", (NEVER_RETRY,))
            finish = self._finish_reason(index, request.sampling)
            yield worker_pb2.PrefillEvent(
                first_token=worker_pb2.FirstToken(
                    token=self._sample(prompt, index, request.sampling),
                    wait_s=0.001,
                    model_s=0.002,
                    prefill_forwards=1,
                    finished=finish != common_pb2.FINISH_REASON_UNSPECIFIED,
                    finish_reason=finish,
                )
            )
            if finish == common_pb2.FINISH_REASON_UNSPECIFIED and request.HasField("ticket"):
                yield await self._hand_off(request)
        finally:
            self.used_blocks -= blocks
            self.open_calls -= 1

    async def _hand_off(self, request: worker_pb2.PrefillRequest) -> worker_pb2.PrefillEvent:
        await self._pause(self.handoff_s)
        while self.faults.hold_handoff:  # noqa: ASYNC110  # a plain flag is easier on tests
            await asyncio.sleep(0.005)
        failed = worker_pb2.HandoffFailed
        if self.faults.fail_handoffs > 0:
            self.faults.fail_handoffs -= 1
            return worker_pb2.PrefillEvent(handoff_failed=failed(reason="the link broke"))
        decode = BY_ADDRESS.get(request.decode_address)
        sequence = decode._sequences.get(request.ticket.epoch) if decode is not None else None
        if sequence is None:
            return worker_pb2.PrefillEvent(
                handoff_failed=failed(decode_lost=True, reason="no such ticket")
            )
        sequence.landed.set()
        return worker_pb2.PrefillEvent(
            handoff_done=worker_pb2.HandoffDone(
                kv_bytes=len(request.token_ids) * KV_BYTES_PER_TOKEN, transfer_s=0.003
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
        sequence = Sequence(blocks=0)
        try:
            reserve = (await anext(request_iterator)).reserve
            self.reserves.append(reserve)
            blocks = -(-reserve.max_kv_tokens // self.block_size)
            if self.faults.refuse_reserves > 0:
                self.faults.refuse_reserves -= 1
                await context.abort(self.faults.refusal_code, "not now")
            if blocks > self.total_blocks:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "can never fit")
            if blocks > self.total_blocks - self.used_blocks:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no blocks free")
            sequence.blocks = blocks
            self.used_blocks += blocks
            self._sequences[epoch] = sequence
            await self._pause(0)
            yield worker_pb2.DecodeEvent(
                ticket=worker_pb2.KvTicket(
                    key=reserve.key, epoch=epoch, worker_id=self.worker_id, blocks=blocks
                )
            )
            start = (await anext(request_iterator)).start
            await sequence.landed.wait()
            await self._pause(0)
            yield worker_pb2.DecodeEvent(joined=worker_pb2.Joined())
            async for tokens in self._steps(start):
                yield worker_pb2.DecodeEvent(tokens=tokens)
            if self.faults.break_at is not None:
                await context.abort(grpc.StatusCode.INTERNAL, "NaN", (NEVER_RETRY,))
        finally:
            self._sequences.pop(epoch, None)
            self.used_blocks -= sequence.blocks
            self.open_calls -= 1

    async def _steps(self, start: worker_pb2.Start) -> AsyncIterator[worker_pb2.Tokens]:
        prompt = list(start.token_ids[: start.num_prompt_tokens])
        index = len(start.token_ids) - start.num_prompt_tokens
        forwards, batch = 0, []
        while True:
            await self._pause(self.step_s)
            if index in (self.faults.end_at, self.faults.break_at):
                return
            if index == self.faults.cut_short_at:
                self.faults.cut_short_at = None
                yield worker_pb2.Tokens(
                    finished=True, finish_reason=common_pb2.FINISH_REASON_CANCELLED
                )
                return
            finish = self._finish_reason(index, start.sampling)
            forwards += 1
            if index != self.faults.skip_index:
                batch.append(self._sample(prompt, index, start.sampling))
            finished = finish != common_pb2.FINISH_REASON_UNSPECIFIED
            if finished and self.faults.lose_finish:
                yield worker_pb2.Tokens(tokens=batch, decode_forwards=forwards)
                return
            if len(batch) >= self.tokens_per_event or finished:
                self.num_tokens_sent += len(batch)
                yield worker_pb2.Tokens(
                    tokens=batch,
                    finished=finished,
                    finish_reason=finish,
                    decode_forwards=forwards,
                    model_s=forwards * 0.001,
                )
                batch = []
            if finished:
                return
            index += 1

    # --- control ------------------------------------------------------------------------------

    async def GetIdentity(  # noqa: N802
        self, request: worker_pb2.GetIdentityRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.WorkerIdentity:
        return worker_pb2.WorkerIdentity(
            worker_id=self.worker_id,
            role=ROLE_NUMBERS[self.role],
            model_fingerprint=self.fingerprint,
            weights=self.weights,
            dtype=self.dtype,
            kv_layout=worker_pb2.KvLayout(
                num_layers=2,
                num_kv_heads=self.num_kv_heads,
                head_dim=4,
                block_size=self.block_size,
                dtype="f32",
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
            yield worker_pb2.WorkerReport(
                phase=self.phase,
                load=common_pb2.WorkerLoad(
                    total_blocks=self.total_blocks,
                    free_blocks=self.total_blocks - self.used_blocks,
                    held_blocks=self.used_blocks,
                    running=self.open_calls,
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
        self, prompt: list[int], index: int, sampling: common_pb2.SamplingParams
    ) -> worker_pb2.SampledToken:
        token = worker_pb2.SampledToken(token_id=scripted_token(prompt, index), index=index)
        if sampling.HasField("logprobs"):
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
