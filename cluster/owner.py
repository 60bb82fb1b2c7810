"""Owner: the life of one service, from the first check to the last process, in one process."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import grpc

from legato.cluster.errors import ServiceError
from legato.cluster.heartbeat import dial_address
from legato.cluster.placement import check_own, place
from legato.cluster.pool import ControllerOptions
from legato.cluster.ray_address import bring_token, probe_ray, resolve_ray_address, running_cluster
from legato.cluster.ray_temp import RayTemp, prepare_environment
from legato.cluster.roles import role_of
from legato.cluster.router_ports import check_port, http_ports, router_ports
from legato.cluster.security_rules import check_security, inner_access, own_access
from legato.cluster.stop_signal import StartInterruptedError
from legato.cluster.version import legato_version
from legato.cluster.watchdog import Watchdog
from legato.protos import cluster_pb2, cluster_pb2_grpc

if TYPE_CHECKING:
    from legato.cluster.actors.service import RayService
    from legato.cluster.client_access import ClientAccess
    from legato.cluster.config import ServiceConfig
    from legato.cluster.placement import ClusterFacts
    from legato.cluster.stop_signal import StopSignal
    from legato.protos.tls_files import TlsFiles

POLL_S = 0.1
NODES_POLL_S = 0.5
JOIN_TIMEOUT_S = 25.0  # Ray's own bound, where there is one, is some minutes
CLOSE_TIMEOUT_S = 15.0  # then this process ends at once, and the janitor ends the rest
ASK_S = 5.0  # for one answer of the controller's, during the start
DRAIN_S = 10.0  # for running requests, on Ctrl-C and SIGTERM
# What a drain, and the workers' end, may take beyond their own time; and where haste was asked for.
END_SLACK_S, HASTE_S = 5.0, 2.0


class Progress(Protocol):
    """Where the owner tells what it is doing."""

    def stage(self, text: str) -> None:
        """A step is done, or something is to be known."""
        ...

    def state(self, text: str) -> None:
        """What is being waited for now. `weights 40 %` in it may be shown as a bar."""
        ...

    def amount(self, text: str, done: int, total: int) -> None:
        """What is being waited for now, and how many bytes of it are there. From any thread."""
        ...


class Owner:
    """Starts, watches and ends one service. `start` must run in the main thread."""

    def __init__(self, config: ServiceConfig, progress: Progress, stop: StopSignal) -> None:
        self._config = config
        self._progress = progress
        self._stop = stop
        self._ray: RayService | None = None
        self._temp: RayTemp | None = None

    def start(self) -> str:
        """Returns the public addresses, joined by commas, when every worker asked for is ready.

        Raises:
            ServiceError: one sentence with what to do.
            StartInterruptedError: a signal came first.
        """
        config = self._config
        for port in router_ports(config):
            check_port(config.router.host, port)
        for port in http_ports(config):
            check_port(config.router.host, port, port_option="--http-port")
        self._check_security()
        ray_address = self._ray_address()
        if ray_address is None:
            self._check_own()
        prepare_environment(own_ray=ray_address is None)
        # Late, and only here: it takes a moment, and `legato --help` must not wait for it.
        from legato.cluster.actors.kv_room import check_room, own_memory
        from legato.cluster.actors.model_path import resolve_model_path
        from legato.cluster.actors.plans import RouterPlan, WorkerPlan
        from legato.cluster.actors.service import RayService

        try:
            model_path = resolve_model_path(
                config.model,
                lambda done, total: self._progress.amount(
                    f"downloading {config.model}", done, total
                ),
            )
            sizes = config.pool_sizes
            check_room(
                model_path,
                [
                    config.decode_engine() if role == "decode" else config.engine
                    for role in sizes
                    if sizes[role]
                ],
                most_bytes=own_memory() if ray_address is None else None,
            )
        except (ValueError, OSError) as error:
            raise ServiceError(str(error)) from error
        self._check_stop()
        deadline_s = time.monotonic() + config.start_timeout_s  # a download has its own bounds
        self._ray = service = RayService()
        if ray_address is None:
            self._progress.state("starting Ray")
            self._temp = RayTemp()
            # Our actors need no CPU of Ray's; where the user counts them, these are the machine's.
            cores = len(os.sched_getaffinity(0))
            num_actors = config.num_workers + 1 + config.num_routers
            facts = service.start_own(
                self._temp.ray_folder,
                cores if config.asks_cpus else num_actors,
                deadline_s - time.monotonic(),
                lambda: self._progress.stage("Ray did not start in time; tried once more"),
            )
            self._progress.stage("Ray started")
        else:
            self._progress.state(f"joining Ray at {ray_address}")
            bound_s = min(JOIN_TIMEOUT_S, config.start_timeout_s)
            with Watchdog(bound_s, f"joining Ray at {ray_address}"):
                facts = service.join(ray_address)
            self._progress.stage(f"joined Ray at {ray_address}, nodes: {len(facts.nodes)}")
        self._stop.install()
        self._check_stop()
        if ray_address is not None:
            facts = self._await_nodes(service, facts, deadline_s)
        try:
            placements = place(config, facts)
        except ValueError as error:
            raise ServiceError(str(error)) from error
        # Nodes have files of their own: there a hub id, or demo, is looked up again, by each.
        for_routers, for_workers = inner_access(config)
        everywhere = len(facts.nodes) == 1 or Path(config.model).exists()
        service.launch(
            WorkerPlan(
                model=str(model_path) if everywhere else config.model,
                engines={
                    "prefill": config.engine,
                    "decode": config.decode_engine(),
                    "colocated": config.engine,
                },
                placements=placements,
                spread=len(facts.nodes) > 1,
                nodes_may_come=facts.joined and service.nodes_may_come(),
                access=for_workers,
            ),
            RouterPlan(
                options=replace(config.router, access=for_routers),
                num_routers=config.num_routers,
                model_path=str(model_path),
                model_name=config.public_model_name,
                version=legato_version(),
                owner_pid=os.getpid(),
                owner_host=socket.gethostname(),
                started_at=time.monotonic(),
            ),
            config.pool_sizes,
            ControllerOptions(
                start_timeout_s=config.start_timeout_s,
                restart=config.restart,
                autoscale=config.autoscale,
            ),
        )
        return self._wait_until_ready(service, deadline_s)

    def wait(self) -> float:
        """Returns when the end is asked for: the seconds that running requests have.

        Routers and controller that die or hang meanwhile are started again. Where the head of our
        own Ray is lost, what runs serves on.

        Raises:
            ServiceError: they are gone for good.
        """
        service = self._running()
        while not self._stop.count:
            for news in service.tend():
                self._progress.stage(news)
            if failure := service.failure():
                raise ServiceError(f"{failure}; ending the service")
            asked = service.end_asked()
            if asked is not None:
                return asked
            time.sleep(POLL_S)
        return DRAIN_S

    @property
    def public_access(self) -> tuple[TlsFiles | None, str | None]:
        """What its clients meet: TLS, and the file of their tokens."""
        return self._config.router.tls, self._config.router.token_file

    @property
    def http_addresses(self) -> list[str]:
        """host:port of the HTTP endpoints of a service that has been started."""
        return self._running().http_addresses()

    @property
    def access(self) -> ClientAccess:
        """To the service's own routers."""
        return own_access(self._config.router)

    @property
    def stop_asked(self) -> bool:
        """True once a signal came."""
        return self._stop.count > 0

    def end(self, drain_timeout_s: float | None, because: str = "") -> None:
        """Drains, then ends every process. None: without a drain. A further signal cuts what runs,
        whose clients are told; one more does not wait for that either.

        `because` is what went wrong, if anything did: said here where this process must be cut
        off, since nobody comes to say it then.
        """
        service, signals = self._ray, self._stop.count
        try:
            if service is not None and drain_timeout_s is not None:
                self._progress.state("ending: running requests may finish (Ctrl-C: at once)")
                num_cut = self._drain(service, drain_timeout_s)
                self._progress.state("ending: stopping workers")
                bound_s = END_SLACK_S if self._stop.count == signals else HASTE_S
                self._await(service, service.begin_stop(num_cut), bound_s)
        finally:
            if service is not None:
                # Ray waits for its own parts, and one that hangs is waited for without end.
                with Watchdog(CLOSE_TIMEOUT_S, "ending Ray", because):
                    service.close()
            if self._temp is not None:
                self._temp.remove()
            if service is not None and service.head_lost:
                self._leave(because)
            self._ray = self._temp = None

    def _leave(self, because: str) -> None:
        """Ends this process without Ray's own farewell, which would wait for the lost head for
        seconds, and make the folder anew.
        """
        if because:
            print(f"legato: {because}", file=sys.stderr, flush=True)
        else:
            self._progress.stage("ended")
        os._exit(1 if because else 0)

    def _drain(self, service: RayService, drain_s: float) -> int:
        """Until running requests have ended or were cut; says and returns how many were.

        Who asks for the end meanwhile gives them another time; a signal takes it from them.
        """
        signals, is_hurried, when = self._stop.count, False, f"after {drain_s:g} s"
        calls = service.begin_drain(drain_s)
        deadline_s = time.monotonic() + drain_s + END_SLACK_S
        while time.monotonic() < deadline_s and self._stop.count <= signals + is_hurried:
            service.tend()  # the controller, too, must know that we live
            if service.done(calls, POLL_S):
                break
            asked_s = service.end_asked()
            if self._stop.count > signals and not is_hurried:
                is_hurried, when = True, "at once"
                calls = service.begin_drain(0.0)
                deadline_s = time.monotonic() + HASTE_S
            elif asked_s is not None and not is_hurried:
                when = f"after {asked_s:g} s"
                calls = service.begin_drain(asked_s)
                deadline_s = time.monotonic() + asked_s + END_SLACK_S
        num_cut = service.num_cut(calls)
        if num_cut:
            requests = "request was" if num_cut == 1 else "requests were"
            self._progress.stage(f"{num_cut} running {requests} cut {when}")
        return num_cut

    def _await(self, service: RayService, calls: list[object], bound_s: float) -> None:
        """Or until a further signal."""
        deadline_s, signals = time.monotonic() + bound_s, self._stop.count
        while self._stop.count == signals and time.monotonic() < deadline_s:
            service.tend()
            if service.done(calls, POLL_S):
                return

    def _await_nodes(
        self, service: RayService, facts: ClusterFacts, deadline_s: float
    ) -> ClusterFacts:
        wanted = self._config.await_nodes
        while len(facts.nodes) < wanted:
            told = f"{len(facts.nodes)} of {wanted} nodes have joined the Ray cluster"
            if time.monotonic() > deadline_s:
                raise ServiceError(
                    f"{told} within {self._config.start_timeout_s:g} s; start `ray start "
                    "--address …` on the others, or lower --await-nodes"
                )
            self._progress.state(f"waiting: {told}")
            time.sleep(NODES_POLL_S)
            self._check_stop()
            facts = service.facts_now()
        return facts

    def _ray_address(self) -> str | None:
        if self._config.ray_address is None:
            if (other := running_cluster()) and _is_ray(other):
                self._progress.stage(
                    f"a Ray cluster at {other} is not used; --ray-address auto would join it"
                )
            return None
        address = resolve_ray_address(self._config.ray_address)
        if probe_ray(address):
            bring_token(address)
        return address

    def _check_own(self) -> None:
        """What a Ray of our own, on this machine, is known not to have before it is started."""
        config = self._config
        try:
            check_own(config)
        except ValueError as error:
            raise ServiceError(str(error)) from error
        if config.worker_host != "auto":
            check_port(config.worker_host, 0, option="--worker-host")

    def _wait_until_ready(self, service: RayService, deadline_s: float) -> str:
        timeout_s = self._config.start_timeout_s
        while True:
            self._check_stop()
            service.tend()
            bound_s = min(ASK_S, max(POLL_S, deadline_s - time.monotonic()))
            if failure := service.start_failure(bound_s):
                raise ServiceError(failure)
            addresses, pools = service.router_addresses(), service.pools(bound_s)
            shown = [pool for pool in pools or () if pool.target]
            text = ", ".join(_pool_text(pool) for pool in shown) or "controller starting"
            if not addresses:
                text += ", router starting"
            self._progress.state(text)
            full = pools is not None and all(pool.ready == pool.target for pool in pools)
            left_s = deadline_s - time.monotonic()
            if addresses and full and all(self._serves(address, left_s) for address in addresses):
                return ",".join(addresses)
            if time.monotonic() > deadline_s:
                raise ServiceError(f"not ready within --start-timeout {timeout_s:g} s: {text}")
            time.sleep(POLL_S)

    def _check_security(self) -> None:
        try:
            notes = check_security(self._config)
        except ValueError as error:
            raise ServiceError(str(error)) from error
        for note in notes:
            self._progress.stage(note)

    def _serves(self, address: str, left_s: float) -> bool:
        options = [("grpc.enable_http_proxy", 0)]
        with self.access.channel(dial_address(address), options) as channel:
            try:
                stub = cluster_pb2_grpc.ClusterStub(channel)
                bound_s = min(2.0, max(0.1, left_s))
                return stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=bound_s).ready
            except grpc.RpcError:
                return False  # asked again, until the start's own bound

    def _check_stop(self) -> None:
        if self._stop.count:
            raise StartInterruptedError

    def _running(self) -> RayService:
        if self._ray is None:
            raise RuntimeError("the service has not been started")
        return self._ray


def _is_ray(address: str) -> bool:
    try:
        probe_ray(resolve_ray_address(address), timeout_s=1.0)
    except ServiceError:
        return False
    return True


def _pool_text(pool: cluster_pb2.PoolStatus) -> str:
    return f"{role_of(pool.role)}: {pool.message or f'{pool.ready} of {pool.target} ready'}"
