"""SimulatedAccess: channels to simulated workers, of which a router learns who they are and do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from legato.protos import common_pb2, worker_pb2
from legato.protos.internal_access import InternalAccess
from legato.protos.protocol_version import PROTOCOL_VERSION
from legato.worker.services.control import REPORT_AT_LEAST_EVERY_S, REPORT_EVERY_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    import grpc

    from legato.plan.simulation.decode_worker import DecodeWorker
    from legato.plan.simulation.prefill_worker import PrefillWorker

    Worker = PrefillWorker | DecodeWorker

_ROLES = {
    "prefill": common_pb2.WORKER_ROLE_PREFILL,
    "decode": common_pb2.WORKER_ROLE_DECODE,
}


@dataclass(frozen=True)
class SimulatedAccess(InternalAccess):
    """The address of a worker is its id; all have as many KV blocks."""

    workers: Mapping[str, Worker] = field(default_factory=dict)
    num_blocks: int = 1
    block_size: int = 1

    def channel(self, address: str, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
        """To the worker of that id."""
        worker = self.workers[address]
        return _Channel(address, worker, self.num_blocks, self.block_size)  # type: ignore[return-value]  # what a WorkerView uses of one


class _Channel:
    """Knows the two calls by which a router watches a worker."""

    def __init__(self, worker_id: str, worker: Worker, num_blocks: int, block_size: int) -> None:
        self._worker = worker
        self._identity = worker_pb2.WorkerIdentity(
            worker_id=worker_id,
            role=_ROLES[worker_id.partition("-")[0]],
            model_fingerprint="simulated",
            dtype="bfloat16",
            kv_layout=worker_pb2.KvLayout(
                block_size=block_size, num_layers=1, num_kv_heads=1, head_dim=1, dtype="bfloat16"
            ),
            total_blocks=num_blocks,
            context_length=num_blocks * block_size,
            vocab_size=1,
            protocol_version=PROTOCOL_VERSION,
            kv_wire="same",
        )

    def unary_unary(self, method: str, *_: object, **__: object) -> Any:  # noqa: ANN401  # a stub's call
        """GetIdentity, or one that is never called."""
        return self._get_identity if method.endswith("/GetIdentity") else None

    def unary_stream(self, method: str, *_: object, **__: object) -> Any:  # noqa: ANN401  # a stub's call
        """WatchLoad."""
        return self._watch_load if method.endswith("/WatchLoad") else None

    def stream_stream(self, *_: object, **__: object) -> None:
        """Prompts and answers do not go this way."""

    async def close(self) -> None:
        """Nothing is open."""

    async def _get_identity(self, *_: object, **__: object) -> worker_pb2.WorkerIdentity:
        return self._identity

    async def _watch_load(self, *_: object, **__: object) -> AsyncIterator[worker_pb2.WorkerReport]:
        """As `ControlService.WatchLoad` tells it."""
        loop = asyncio.get_running_loop()
        sent: common_pb2.WorkerLoad | None = None
        sent_at_s = 0.0
        while True:
            load, now_s = self._worker.load(), loop.time()
            if load != sent or now_s - sent_at_s >= REPORT_AT_LEAST_EVERY_S - REPORT_EVERY_S:
                sent, sent_at_s = load, now_s
                yield worker_pb2.WorkerReport(phase=common_pb2.WORKER_PHASE_READY, load=load)
            await asyncio.sleep(REPORT_EVERY_S)
