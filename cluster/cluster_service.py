"""ClusterService: the operators' side of the gateway: status, scaling, shutdown."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from legato.cluster.error_reasons import Reason
from legato.cluster.error_status import with_status
from legato.cluster.errors import RequestError, invalid, unavailable
from legato.cluster.known_fields import check_known_fields
from legato.cluster.pool import MAX_POOL_SIZE
from legato.cluster.role_change import RoleChangeRefusedError, UnknownWorkerError
from legato.cluster.roles import WIRE_ROLES, role_of, wire_targets
from legato.cluster.worker_view import ViewState
from legato.protos import cluster_pb2, cluster_pb2_grpc, common_pb2

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from legato.cluster.control_plane import Role
    from legato.cluster.router import Router

CONTROL_TIMEOUT_S = 2.0  # for status: an answer without the controller is better than none
COMMAND_TIMEOUT_S = 8.0  # less than a client waits
DEFAULT_DRAIN_S = 10.0
MAX_WORKER_ID_CHARS = 256
MAX_NODE_CHARS = 256  # as many as DNS has
MAX_DRAIN_S = 600.0

T = TypeVar("T")
log = logging.getLogger(__name__)


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    """Checks, then asks the controller; adds what the router itself sees."""

    def __init__(self, router: Router) -> None:
        self._router = router

    @with_status
    async def GetStatus(  # noqa: N802  # named by the proto
        self,
        request: cluster_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.GetStatusResponse:
        """See cluster.proto. Answers within CONTROL_TIMEOUT_S, whatever the controller does."""
        check_known_fields(request)
        router = self._router
        pools, autoscaler = await asyncio.gather(self._pools(), self._autoscaler())
        counters = router.counters
        return cluster_pb2.GetStatusResponse(
            model=router.model_name,
            version=router.version,
            uptime_s=time.monotonic() - router.started_at,
            ready=router.ready,
            pools=pools,
            router=cluster_pb2.RouterStatus(
                queued=router.admission.num_queued,
                in_flight=router.num_in_flight,
                completed=counters.completed,
                failed=counters.failed,
                cancelled=counters.cancelled,
                refused=counters.refused,
                moved=counters.moved,
                moved_with_kv=counters.moved_with_kv,
                http_port=int(router.http_address.rpartition(":")[2] or 0),
                drain_left_s=router.drain_left_s,
            ),
            owner_pid=router.owner_pid,
            owner_host=router.owner_host,
            autoscaler=autoscaler,
        )

    @with_status
    async def ScalePool(  # noqa: N802  # named by the proto
        self,
        request: cluster_pb2.ScalePoolRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.ScalePoolResponse:
        """See cluster.proto."""
        targets = read_targets(request)
        try:
            result = await _asked(self._router.control.scale(targets))
        except ValueError as error:  # an autoscaled pool's range is the controller's to know
            role, _, rest = str(error).partition(" ")
            places = {name: f"targets[{index}].target" for index, name in enumerate(targets)}
            sentence = f"{places[role]} {rest}" if role in places else f"targets: {error}"
            raise invalid(sentence) from error
        return cluster_pb2.ScalePoolResponse(targets=wire_targets(result))

    @with_status
    async def ChangeRole(  # noqa: N802  # named by the proto
        self,
        request: cluster_pb2.ChangeRoleRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.ChangeRoleResponse:
        """See cluster.proto."""
        check_known_fields(request)
        role, worker_id = _read_role("role", request.role), _read_worker_id(request.worker_id)
        change = await _ordered(self._router.control.change_role(worker_id, role))
        return cluster_pb2.ChangeRoleResponse(
            worker_id=change.worker_id, targets=wire_targets(change.targets)
        )

    @with_status
    async def DrainWorker(  # noqa: N802  # named by the proto
        self,
        request: cluster_pb2.DrainWorkerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.DrainWorkerResponse:
        """See cluster.proto."""
        check_known_fields(request)
        asked_id = _read_worker_id(request.worker_id)
        worker_id = await _ordered(self._router.control.drain_worker(asked_id))
        return cluster_pb2.DrainWorkerResponse(worker_id=worker_id)

    @with_status
    async def DrainNode(  # noqa: N802  # named by the proto
        self,
        request: cluster_pb2.DrainNodeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.DrainNodeResponse:
        """See cluster.proto."""
        check_known_fields(request)
        if len(request.node) > MAX_NODE_CHARS:
            raise invalid(f"node has {len(request.node)} chars, limit {MAX_NODE_CHARS}")
        call = self._router.control.drain_node(request.node)
        worker_ids = await _ordered(call, unknown=Reason.UNKNOWN_NODE)
        return cluster_pb2.DrainNodeResponse(worker_ids=worker_ids)

    @with_status
    async def Shutdown(  # noqa: N802  # named by the proto
        self,
        request: cluster_pb2.ShutdownRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.ShutdownResponse:
        """See cluster.proto."""
        check_known_fields(request)
        drain_s = request.drain_timeout_s if request.HasField("drain_timeout_s") else None
        if drain_s is None:
            drain_s = DEFAULT_DRAIN_S
        if not math.isfinite(drain_s) or not 0 <= drain_s <= MAX_DRAIN_S:
            raise invalid(f"drain_timeout_s is {drain_s:g}, limit [0, {MAX_DRAIN_S:g}]")
        await _asked(self._router.control.shutdown(drain_s))
        if not request.wait:
            return cluster_pb2.ShutdownResponse()
        return cluster_pb2.ShutdownResponse(num_cut=await self._router.end_told())

    async def _pools(self) -> list[cluster_pb2.PoolStatus]:
        """The controller's pools with the loads that the router sees."""
        try:
            told = await asyncio.wait_for(self._router.control.pools(), CONTROL_TIMEOUT_S)
        except (TimeoutError, ConnectionError) as error:
            log.warning("the controller did not tell its pools: %s", error)
            return self._own_pools()
        except Exception:
            log.exception("the controller did not tell its pools")
            return self._own_pools()
        pools = []
        for told_pool in told:
            pool = cluster_pb2.PoolStatus()
            pool.CopyFrom(told_pool)  # what we add is not the controller's
            pools.append(pool)
            for worker in pool.workers:
                view = self._router.pool.view(worker.worker_id)
                if view is not None and view.load is not None:
                    worker.load.CopyFrom(view.load)
                if view is not None and view.state is ViewState.LOST:
                    pool.message = pool.message or f"{view.worker_id} is lost: {view.lost_reason}"
        return pools

    async def _autoscaler(self) -> cluster_pb2.AutoscalerStatus | None:
        if not self._router.options.reports_load:
            return None
        try:
            return await asyncio.wait_for(self._router.control.autoscaler(), CONTROL_TIMEOUT_S)
        except Exception:
            log.exception("the controller did not tell of its autoscaler")
            return None

    def _own_pools(self) -> list[cluster_pb2.PoolStatus]:
        pools = []
        for role, proto_role in WIRE_ROLES.items():
            views = [v for v in self._router.pool.views() if v.endpoint.role == role]
            if role == "colocated" and not views:
                continue
            pools.append(
                cluster_pb2.PoolStatus(
                    role=proto_role,
                    ready=len(self._router.pool.placeable(role)),
                    workers=[
                        cluster_pb2.WorkerStatus(
                            worker_id=view.worker_id,
                            role=proto_role,
                            phase=view.phase
                            if view.state is ViewState.READY
                            else common_pb2.WORKER_PHASE_DEAD,
                            address=view.endpoint.address,
                            pid=view.identity.pid if view.identity else 0,
                            host=view.identity.host if view.identity else "",
                            load=view.load,
                        )
                        for view in views
                    ],
                    message="the controller does not answer: this is the router's own view, "
                    "without targets",
                )
            )
        return pools


async def _ordered(call: Coroutine[Any, Any, T], *, unknown: Reason = Reason.UNKNOWN_WORKER) -> T:
    """As `_asked`, of an order to workers; what is wrong with it has a status of its own."""
    try:
        return await _asked(call)
    except UnknownWorkerError as error:
        raise RequestError(grpc.StatusCode.NOT_FOUND, str(error), reason=unknown) from None
    except RoleChangeRefusedError as error:
        raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None
    except ValueError as error:
        raise invalid(str(error)) from None


async def _asked(call: Coroutine[Any, Any, T]) -> T:
    """The controller's answer, within a bound."""
    try:
        return await asyncio.wait_for(call, COMMAND_TIMEOUT_S)
    except TimeoutError:
        raise unavailable(f"the controller did not answer within {COMMAND_TIMEOUT_S:g} s") from None
    except ConnectionError as error:  # it restarts, or is gone, or cannot do it now
        raise unavailable(str(error)) from error


def _read_worker_id(text: str) -> str:
    if len(text) > MAX_WORKER_ID_CHARS:
        raise invalid(f"worker_id has {len(text)} chars, limit {MAX_WORKER_ID_CHARS}")
    return text


def _read_role(field: str, number: int) -> Role:
    """Raises RequestError naming field, value and limit."""
    if (role := role_of(number)) is None:
        names = ", ".join(f"{wire} ({name})" for name, wire in WIRE_ROLES.items())
        raise invalid(f"{field} is {number}, limit one of {names}")
    return role


def read_targets(request: cluster_pb2.ScalePoolRequest) -> dict[Role, int]:
    """The sizes asked for.

    Raises:
        RequestError: INVALID_ARGUMENT naming field, value and limit.
    """
    if not request.targets:
        raise invalid(f"targets has 0 entries, limit [1, {len(WIRE_ROLES)}]: each pool once")
    if len(request.targets) > len(WIRE_ROLES):
        raise invalid(
            f"targets has {len(request.targets)} entries, limit [1, {len(WIRE_ROLES)}]: each pool "
            "once"
        )
    check_known_fields(request)  # looks into each, so that there must not be too many
    targets: dict[Role, int] = {}
    for index, item in enumerate(request.targets):
        role = _read_role(f"targets[{index}].role", item.role)
        if role in targets:
            raise invalid(f"targets[{index}].role is {item.role} again, limit each pool once")
        limit = f"[0, {MAX_POOL_SIZE}]: the size of the {role} pool"
        if not item.HasField("target"):
            raise invalid(f"targets[{index}].target is not set, limit {limit}")
        if not 0 <= item.target <= MAX_POOL_SIZE:
            raise invalid(f"targets[{index}].target is {item.target}, limit {limit}")
        targets[role] = item.target
    return targets
