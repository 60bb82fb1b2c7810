"""ControlService: identity, load and draining."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from legato.protos import common_pb2, worker_pb2, worker_pb2_grpc
from legato.protos.protocol_version import PROTOCOL_VERSION
from legato.worker.identity import dtype_name
from legato.worker.lifecycle import Phase
from legato.worker.services.errors import reports_errors
from legato.worker.services.prefix_reports import PrefixReports

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from legato.worker.identity import Identity
    from legato.worker.kv.block_pool import BlockPool
    from legato.worker.lifecycle import Lifecycle

    Context = grpc.aio.ServicerContext[Any, Any]

REPORT_EVERY_S = 0.05
REPORT_AT_LEAST_EVERY_S = 0.5

_ROLES = {
    "prefill": common_pb2.WORKER_ROLE_PREFILL,
    "decode": common_pb2.WORKER_ROLE_DECODE,
    "colocated": common_pb2.WORKER_ROLE_COLOCATED,
}
_PHASES = {
    Phase.STARTING: common_pb2.WORKER_PHASE_STARTING,
    Phase.READY: common_pb2.WORKER_PHASE_READY,
    Phase.DRAINING: common_pb2.WORKER_PHASE_DRAINING,
    Phase.DEAD: common_pb2.WORKER_PHASE_DEAD,
}


class ControlService(worker_pb2_grpc.WorkerControlServicer):
    """`read_load` is cheap and consistent; `begin_drain` returns at once."""

    def __init__(
        self,
        identity: Identity,
        lifecycle: Lifecycle,
        read_load: Callable[[], common_pb2.WorkerLoad],
        begin_drain: Callable[[], None],
        *,
        kv_wire: str,
        pool: BlockPool,
    ) -> None:
        self._identity = identity
        self._lifecycle = lifecycle
        self._read_load = read_load
        self._begin_drain = begin_drain
        self._kv_wire = kv_wire
        self._pool = pool

    @reports_errors
    async def GetIdentity(  # noqa: N802  # the name is the RPC's
        self,
        request: worker_pb2.GetIdentityRequest,
        context: Context,
    ) -> worker_pb2.WorkerIdentity:
        """Who this is and what it can hold."""
        identity = self._identity
        return worker_pb2.WorkerIdentity(
            worker_id=identity.worker_id,
            role=_ROLES[identity.role],
            model_fingerprint=identity.model_fingerprint,
            dtype=dtype_name(identity.dtype),
            kv_layout=identity.kv_layout(),
            total_blocks=identity.total_blocks,
            context_length=identity.context_length,
            vocab_size=identity.model.vocab_size,
            architecture=identity.model.architecture,
            pid=os.getpid(),
            host=socket.gethostname(),
            protocol_version=PROTOCOL_VERSION,
            weights=identity.weights,
            kv_wire=self._kv_wire,
        )

    @reports_errors
    async def WatchLoad(  # type: ignore[override]  # noqa: N802  # the stub knows generators only; the name is the RPC's
        self,
        request: worker_pb2.WatchLoadRequest,
        context: Context,
    ) -> None:
        """A report now, then on every change, and at least each half second."""
        prefixes = PrefixReports(self._pool)
        sent: worker_pb2.WorkerReport | None = None
        sent_at_s = 0.0
        while True:
            report = worker_pb2.WorkerReport(
                phase=_PHASES[self._lifecycle.phase], load=self._read_load()
            )
            now_s = time.monotonic()
            changes = prefixes.take()
            if (
                report != sent
                or changes is not None
                or now_s - sent_at_s >= REPORT_AT_LEAST_EVERY_S - REPORT_EVERY_S
            ):
                sent = worker_pb2.WorkerReport(phase=report.phase, load=report.load)
                if changes is not None:
                    report.prefix_changes.CopyFrom(changes)
                await context.write(report)
                sent_at_s = now_s
            await asyncio.sleep(REPORT_EVERY_S)

    @reports_errors
    async def Drain(  # noqa: N802  # the name is the RPC's
        self,
        request: worker_pb2.DrainRequest,
        context: Context,
    ) -> worker_pb2.DrainResponse:
        """No new work from now on."""
        self._begin_drain()
        return worker_pb2.DrainResponse()
