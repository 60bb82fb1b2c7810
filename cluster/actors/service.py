"""RayService: what a service's owner holds: Ray itself, the routers' actors, the controller's."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import time
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from legato.cluster.actors.calls import CALL_TIMEOUT_S
from legato.cluster.actors.cluster_nodes import may_grow, read_nodes
from legato.cluster.actors.controller_actor import HEAD_LOST
from legato.cluster.actors.controller_link import ControllerLink
from legato.cluster.actors.head_store import forget
from legato.cluster.actors.hush_ray import hush_ray
from legato.cluster.actors.launcher import STOP_GRACE_S
from legato.cluster.actors.lean_ray import lean_ray
from legato.cluster.actors.router_group import RouterGroup
from legato.cluster.errors import ServiceError
from legato.cluster.owner_watch import OwnerProcess
from legato.cluster.placement import ClusterFacts
from legato.cluster.ray_address import probe_ray
from legato.protos import cluster_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from legato.cluster.actors.plans import RouterPlan, WorkerPlan
    from legato.cluster.control_plane import Role
    from legato.cluster.pool import ControllerOptions

_VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")
TOO_SLOW = "timed out during startup"  # Ray's words for its own bound, 30 s
BUSY = "the machine may have too much to do: try again when it has less"
OBJECT_STORE_BYTES = 80 << 20  # close to Ray's least: we put nothing in it


class RayService:
    """Not thread-safe."""

    def __init__(self) -> None:
        # Names in it are this service's alone, also where it shares the cluster with others.
        self._namespace = f"legato-{secrets.token_hex(8)}"
        self._controller: ControllerLink | None = None
        self._routers: RouterGroup | None = None
        self._head: psutil.Process | None = None  # of our own Ray
        self._head_lost = False
        hush_ray()

    def start_own(
        self,
        temp_dir: Path,
        num_cpus: int,
        bound_s: float = math.inf,
        on_retry: Callable[[], None] = lambda: None,
    ) -> ClusterFacts:
        """Starts a Ray for this service alone; it ends with this process, however that ends. On a
        busy machine Ray may give itself up: there is one more try, where `bound_s` is not over.

        Raises:
            ServiceError: it does not start.
        """
        deadline_s = time.monotonic() + bound_s
        try:
            self._init_own(temp_dir, num_cpus)
        except ServiceError as error:
            if TOO_SLOW not in str(error):
                raise
            ray.shutdown()
            if time.monotonic() >= deadline_s:
                raise ServiceError(f"{str(error).rstrip('.')}; {BUSY}") from error
            on_retry()
            try:
                self._init_own(temp_dir, num_cpus)
            except ServiceError as again:
                raise ServiceError(
                    f"{str(again).rstrip('.')}; so it did once before; {BUSY}"
                ) from again
        children = psutil.Process().children()
        heads = [child for child in children if child.name() == "gcs_server"]
        self._head = max(heads, key=lambda child: child.create_time(), default=None)
        return self._facts(joined=False)

    def _init_own(self, temp_dir: Path, num_cpus: int) -> None:
        # The kernel ties Ray's processes to the thread that starts them: this must be the main one.
        with failure_in_words("Ray could not be started"), lean_ray():
            ray.init(
                address="local",
                namespace=self._namespace,
                num_cpus=num_cpus,  # how many processes Ray readies, too
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                configure_logging=False,
                log_to_driver=False,
                _temp_dir=str(temp_dir),
                _node_ip_address="127.0.0.1",
            )

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
        with failure_in_words(f"joining Ray at {address} failed"):
            ray.init(
                address=address,
                namespace=self._namespace,
                configure_logging=False,
                log_to_driver=False,
            )
        return self._facts(joined=True)

    def launch(
        self,
        worker_plan: WorkerPlan,
        router_plan: RouterPlan,
        targets: Mapping[Role, int],
        options: ControllerOptions,
    ) -> None:
        """Begins to start everything."""
        node_id, me = ray.get_runtime_context().get_node_id(), psutil.Process()

        # Not soft: Ray then places an actor elsewhere as it likes, and the controller would be lost
        # with a machine that is a worker's. Where this one is lost: see `orphan_watch`.
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        here = {"num_cpus": 0, "scheduling_strategy": strategy}
        owner = OwnerProcess(node_id, me.pid, me.create_time())
        self._controller = ControllerLink(worker_plan, targets, options, owner, here)
        self._routers = RouterGroup(self._controller.handle, router_plan, here)

    def tend(self) -> list[str]:
        """Keeps routers and controller alive; returns what a person should know. To be called a few
        times a second for as long as the service runs.
        """
        now_s, news = time.monotonic(), []
        if self._head is not None and not self._head_lost and not _lives(self._head):
            self._head_lost = True
            if self._controller is not None:
                self._controller.ask("head_lost")
                self._controller.head_lost = True  # it is said here
            news.append(HEAD_LOST)
        if self._routers is not None:
            news += self._routers.look(now_s)
        if self._controller is not None and (text := self._controller.look(now_s)):
            news.append(text)
        return news

    @property
    def head_lost(self) -> bool:
        """True once the head of our own Ray has ended: nothing is started again after that."""
        return self._head_lost

    def failure(self) -> str:
        """Why the service cannot go on; empty while it can."""
        if self._controller is None or self._routers is None:
            return ""
        return self._routers.failure() or self._controller.failure

    def start_failure(self, bound_s: float = CALL_TIMEOUT_S) -> str:
        """Why the service cannot come up; empty while it may. Asks for `bound_s` at most."""
        if self._head_lost:
            return "Ray's head process (gcs_server) ended"
        if self._controller is None or self._routers is None:
            return ""
        failed = self._routers.start_failure() or self._controller.failure
        return failed or self._controller.ask("hopeless", bound_s) or ""

    def router_addresses(self) -> list[str]:
        """host:port of each, once all serve."""
        return [] if self._routers is None else self._routers.addresses()

    def http_addresses(self) -> list[str]:
        """host:port of each HTTP endpoint; none where there is none."""
        return [] if self._routers is None else self._routers.http_addresses()

    def pools(self, bound_s: float = CALL_TIMEOUT_S) -> list[cluster_pb2.PoolStatus] | None:
        """See Controller.pools; None where it does not answer within `bound_s`, such as while it
        restarts.
        """
        raw = None if self._controller is None else self._controller.ask("pools", bound_s)
        return None if raw is None else [cluster_pb2.PoolStatus.FromString(data) for data in raw]

    def end_asked(self) -> float | None:
        """The seconds given to running requests, each time that somebody asked for the end."""
        return None if self._routers is None else self._routers.end_asked()

    def begin_drain(self, drain_timeout_s: float) -> list[Any]:
        """Closes the routers to new requests; `done` tells when the running ones have ended. The
        newest call's time counts.
        """
        return [] if self._routers is None else self._routers.begin_drain(drain_timeout_s)

    def num_cut(self, calls: list[Any]) -> int:
        """Of calls of `begin_drain` that have ended: how many requests had not, and were cut."""
        num_cut = 0
        for call in calls:
            with contextlib.suppress(RayError):  # its router died; or it has not ended
                num_cut += ray.get(call, timeout=0)
        return num_cut

    def begin_stop(self, num_cut: int) -> list[Any]:
        """Closes the ports, where those who wait are told how many were cut; ends the workers."""
        calls = [] if self._routers is None else self._routers.begin_close(num_cut)
        if self._controller is not None:
            calls.append(self._controller.handle.stop_workers.remote(STOP_GRACE_S))
        return calls

    def done(self, calls: list[Any], timeout_s: float) -> bool:
        """Waits for calls of `begin_...`; True when all have ended, well or not."""
        if not calls:
            return True
        _, running = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
        return not running

    def close(self) -> None:
        """Ends the actors, and Ray if it is our own.

        Where its head is lost, nothing here can: its calls would not return, and whoever holds the
        temporary folder ends the processes that carry its mark.
        """
        if self._head_lost:
            return
        if self._routers is not None:
            self._routers.kill()
        if self._controller is not None:
            ray.kill(self._controller.handle, no_restart=True)
            if self._head is None:
                self._leave_nothing()
        ray.shutdown()

    def nodes_may_come(self) -> bool:
        """Whether an autoscaler may add nodes to the cluster."""
        return may_grow()

    def _leave_nothing(self) -> None:
        """Actors that the controller did not end, in a cluster that goes on without us."""
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == self._namespace:
                try:
                    ray.kill(ray.get_actor(actor["name"], self._namespace), no_restart=True)
                except ValueError:
                    continue  # it has just ended
        forget(self._namespace)

    def facts_now(self) -> ClusterFacts:
        """Of the joined cluster, as it is by now."""
        return self._facts(joined=True)

    def _facts(self, *, joined: bool) -> ClusterFacts:
        cores = len(os.sched_getaffinity(0))
        return ClusterFacts(joined=joined, nodes=read_nodes(), num_cores=cores)


@contextlib.contextmanager
def failure_in_words(what: str) -> Iterator[None]:
    """Within the block, whatever Ray raises becomes a ServiceError of one sentence."""
    try:
        yield
    except Exception as error:  # Ray raises bare ones, such as where its raylet starts too slowly
        if versions := _VERSIONS.findall(str(error)):
            (theirs, their_python), (ours, our_python) = versions[0], versions[-1]
            raise ServiceError(
                f"{what}: the cluster runs Ray {theirs} and Python {their_python}, this machine "
                f"Ray {ours} and Python {our_python}; install the same on all machines "
                f"(pip install ray=={theirs})"
            ) from error
        raise ServiceError(f"{what}: {' '.join(str(error).split())[:400]}") from error


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
