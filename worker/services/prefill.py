"""PrefillService: the Prefill call, which owns the prompt's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from legato.protos import worker_pb2, worker_pb2_grpc
from legato.worker.call_trace import begin_call
from legato.worker.kv.block_pool import blocks_for
from legato.worker.kv.progress import KvProgress
from legato.worker.lifecycle import NotReadyError
from legato.worker.sequence import Sequence
from legato.worker.services.call_limit import limited
from legato.worker.services.errors import (
    CallError,
    invalid,
    reports_errors,
    wrong_role,
)
from legato.worker.services.prefill_call import PrefillCall
from legato.worker.services.validation import (
    check_address,
    check_cache_salt,
    check_eos_token_ids,
    check_lengths,
    check_ticket,
    check_token_ids,
    read_key,
    read_num_answers,
    read_sampling,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from legato.protos.tracing import Tracing
    from legato.worker.engine import Engine
    from legato.worker.handoff.sender import KvSender
    from legato.worker.identity import Identity
    from legato.worker.lifecycle import Lifecycle

    Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(worker_pb2_grpc.PrefillWorkerServicer):
    """Handlers write to their context instead of yielding: a cancel then ends them at once, and
    their `finally` blocks run, wherever they wait.
    """

    def __init__(
        self,
        identity: Identity,
        lifecycle: Lifecycle,
        engine: Engine,
        sender: KvSender,
        *,
        prefix_cache: bool,
        tracing: Tracing | None = None,
    ) -> None:
        self._identity = identity
        self._lifecycle = lifecycle
        self._engine = engine
        self._sender = sender
        self._prefix_cache = prefix_cache
        self._tracing = tracing

    @reports_errors
    async def Prefill(  # type: ignore[override]  # noqa: N802  # the stub knows generators only; the name is the RPC's
        self, request_iterator: AsyncIterator[worker_pb2.PrefillCommand], context: Context
    ) -> None:
        """FirstToken, then HandoffDone or HandoffFailed where a ticket was given."""
        if self._identity.role != "prefill":
            raise wrong_role("Prefill", self._identity.role)
        request = await _first_command(request_iterator)
        sequence = self._read(request)
        trace = begin_call(self._tracing, "prefill", context, request.key)
        try:
            with self._lifecycle.work():
                mailbox = self._engine.submit(sequence)
                try:
                    async with limited(context):
                        call = PrefillCall(
                            self._sender, sequence, mailbox, request, context.write, trace
                        )
                        await call.run(request_iterator)
                finally:
                    self._engine.release(sequence, mailbox)
        except NotReadyError as error:
            raise CallError(grpc.StatusCode.UNAVAILABLE, str(error)) from None
        finally:
            trace.end()

    def _read(self, request: worker_pb2.PrefillRequest) -> Sequence:
        """A valid request as a sequence; raises CallError naming field, value and limit."""
        vocab_size = self._identity.model.vocab_size
        key = read_key(request.key)
        params = read_sampling(request.sampling, vocab_size)
        num_tokens = len(request.token_ids)
        check_lengths(
            num_tokens, request.num_prompt_tokens, params.max_tokens, self._identity.context_length
        )
        check_token_ids("token_ids", request.token_ids, vocab_size)
        check_eos_token_ids(request.eos_token_ids, vocab_size)
        check_cache_salt(request.cache_salt)
        block_size = self._identity.kv_shape.block_size
        num_blocks = blocks_for(num_tokens, block_size)
        if num_blocks > self._identity.total_blocks:
            raise CallError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"token_ids has {num_tokens} ids and needs {num_blocks} blocks of {block_size} "
                f"tokens; this worker has {self._identity.total_blocks} in all",
            )
        if request.HasField("ticket"):
            if read_key(request.ticket.key) != key:
                raise invalid("ticket.key is not the request's key")
            check_ticket("ticket", request.ticket)
            check_address("decode_address", request.decode_address)
        progress = None
        if request.HasField("ticket"):
            progress = KvProgress(self._identity.kv_shape.num_layers, num_tokens)
        return Sequence(
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            params=params,
            eos_token_ids=frozenset(request.eos_token_ids),
            block_hashes=self._block_hashes(request),
            num_answers=read_num_answers(request.num_answers),
            progress=progress,
        )

    def _block_hashes(self, request: worker_pb2.PrefillRequest) -> list[bytes]:
        if not self._prefix_cache:
            return []
        hasher = self._identity.prefix_hasher(request.cache_salt)
        return hasher.block_hashes(request.token_ids)


async def _first_command(
    commands: AsyncIterator[worker_pb2.PrefillCommand],
) -> worker_pb2.PrefillRequest:
    async for command in commands:
        if not command.HasField("request"):
            raise invalid(f"command is {command.WhichOneof('command')}, request is expected first")
        return command.request
    raise invalid("the stream ended before request")
