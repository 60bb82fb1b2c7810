"""RayService: what a service's owner holds: Ray itself, the router's actor, the controller's."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from legato.cluster.actors.calls import CALL_TIMEOUT_S, outcome
from legato.cluster.actors.cluster_nodes import may_grow, read_nodes
from legato.cluster.actors.controller_actor import ControllerActor
from legato.cluster.actors.launcher import STOP_GRACE_S
from legato.cluster.actors.router_actor import RouterActor
from legato.cluster.errors import ServiceError
from legato.cluster.placement import ClusterFacts
from legato.cluster.ray_address import probe_ray
from legato.protos import cluster_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from legato.cluster.actors.plans import RouterPlan, WorkerPlan
    from legato.cluster.control_plane import Role
    from legato.cluster.pool import ControllerOptions

OBJECT_STORE_BYTES = 80 << 20  # close to Ray's least: we put nothing in it


class RayService:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._controller: Any = None
        self._router: Any = None
        self._address_call: Any = None
        self._shutdown_call: Any = None
        self._head: psutil.Process | None = None  # of our own Ray
        self._lifelines: dict[Any, str] = {}  # calls that end only where something is wrong

    def start_own(self, temp_dir: Path, num_cpus: int) -> ClusterFacts:
        """Starts a Ray for this service alone; it ends with this process, however that ends.

        Raises:
            ServiceError: it does not start.
        """
        # The kernel ties Ray's processes to the thread that starts them: this must be the main one.
        with _failure_in_words("Ray could not be started"):
            ray.init(
                address="local",
                num_cpus=num_cpus,  # how many processes Ray readies, too
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                configure_logging=False,
                log_to_driver=False,
                _temp_dir=str(temp_dir),
                _node_ip_address="127.0.0.1",
            )
        children = psutil.Process().children()
        self._head = next((child for child in children if child.name() == "gcs_server"), None)
        return self._facts(joined=False)

    def join(self, address: str) -> ClusterFacts:
        """Joins the cluster at host:port, which `probe_ray` has found alive.

        Raises:
            ServiceError: Ray would not find it, or refuses, such as for another version.
        """
        # Ray puts this machine's own address in the place of loopback, and would wait for minutes.
        dialled = canonicalize_bootstrap_address(address) or address
        if dialled != address:
            try:
                probe_ray(dialled)
            except ServiceError as error:
                raise ServiceError(f"Ray takes {address} for {dialled}: {error}") from error
        with _failure_in_words(f"joining Ray at {address} failed"):
            ray.init(address=address, configure_logging=False, log_to_driver=False)
        return self._facts(joined=True)

    def launch(
        self,
        worker_plan: WorkerPlan,
        router_plan: RouterPlan,
        targets: Mapping[Role, int],
        options: ControllerOptions,
    ) -> None:
        """Begins to start everything."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        settings = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": here}
        self._controller = (
            ray.remote(ControllerActor).options(**settings).remote(worker_plan, targets, options)
        )
        self._router = ray.remote(RouterActor).options(**settings).remote()
        self._lifelines = {
            self._controller.run.remote(self._router): "the controller",
            self._router.watch.remote(): "the router",
        }
        self._address_call = self._router.start.remote(self._controller, router_plan)
        self._shutdown_call = self._controller.shutdown_asked.remote()

    def failure(self) -> str:
        """Why the service cannot go on; empty while it can."""
        # Ray itself gives up after a minute, and until then nothing lost is replaced.
        if self._head is not None and not _lives(self._head):
            return "Ray's head process (gcs_server) ended"
        done, _ = ray.wait(list(self._lifelines), timeout=0)
        for call in done:
            return f"{self._lifelines[call]} ended: {outcome(call)}"
        return ""

    def router_address(self) -> str | None:
        """host:port once the router serves; ValueError or OSError where it cannot."""
        done, _ = ray.wait([self._address_call], timeout=0)
        if not done:
            return None
        try:
            address: str = ray.get(self._address_call)
        except RayTaskError as error:
            if isinstance(error.cause, (ValueError, OSError)):
                raise ValueError(str(error.cause)) from error
            raise
        return address

    def pools(self) -> list[cluster_pb2.PoolStatus]:
        """See Controller.pools."""
        raw = ray.get(self._controller.pools.remote(), timeout=CALL_TIMEOUT_S * 2)
        return [cluster_pb2.PoolStatus.FromString(data) for data in raw]

    def hopeless(self) -> str:
        """See Controller.hopeless."""
        reason: str = ray.get(self._controller.hopeless.remote(), timeout=CALL_TIMEOUT_S * 2)
        return reason

    def shutdown_asked(self) -> float | None:
        """The seconds given to running requests, once somebody asked for the end."""
        done, _ = ray.wait([self._shutdown_call], timeout=0)
        if not done or self.failure():
            return None
        seconds: float = ray.get(self._shutdown_call)
        return seconds

    def begin_drain(self, drain_timeout_s: float) -> Any:  # noqa: ANN401  # Ray's references have no static type
        """Closes the router to new requests; `done` tells when the running ones have ended."""
        return self._router.end.remote(drain_timeout_s)

    def begin_stop(self) -> Any:  # noqa: ANN401  # Ray's references have no static type
        """Ends the workers."""
        return self._controller.stop_workers.remote(STOP_GRACE_S)

    def done(self, call: Any, timeout_s: float) -> bool:  # noqa: ANN401  # Ray's references have no static type
        """Waits for a call of `begin_...`; True when it has ended, well or not."""
        finished, _ = ray.wait([call], timeout=timeout_s)
        return bool(finished)

    def close(self) -> None:
        """Ends the actors, and Ray if it is our own."""
        for actor in (self._router, self._controller):
            if actor is not None:
                ray.kill(actor, no_restart=True)
        ray.shutdown()

    def nodes_may_come(self) -> bool:
        """Whether an autoscaler may add nodes to the cluster."""
        return may_grow()

    def _facts(self, *, joined: bool) -> ClusterFacts:
        cores = len(os.sched_getaffinity(0))
        return ClusterFacts(joined=joined, nodes=read_nodes(), num_cores=cores)


@contextmanager
def _failure_in_words(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Ray raises bare ones, such as where its raylet starts too slowly
        raise ServiceError(f"{what}: {' '.join(str(error).split())[:400]}") from error


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
