"""ClusterNodes: the nodes of the Ray cluster as they are now, and those that were just lost."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import ray
import ray._private.state
import ray._private.worker
from ray.core.generated import autoscaler_pb2
from ray.exceptions import RayError

from legato.cluster.node_fit import NodeView, find_node
from legato.cluster.role_change import RoleChangeRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable

log = logging.getLogger(__name__)

READ_PERIOD_S = 1.0
READ_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 1.0  # a raylet that runs has its connections accepted by the kernel


def read_nodes() -> tuple[NodeView, ...]:
    """Those that live. Blocks while Ray's head does not answer."""
    # Public calls give sums over the cluster, which say nothing of what fits on one node.
    free = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]  # Ray's
    nodes = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's
    return tuple(_view(node, free) for node in nodes if node["Alive"])


def may_grow() -> bool:
    """Whether an autoscaler may add nodes to the cluster."""
    config = ray._private.state.state.get_cluster_config()
    return config is not None and any(g.max_count != 0 for g in config.node_group_configs)


class ClusterNodes:
    """Read every second by `run`. `nodes` is empty until the first time."""

    def __init__(self) -> None:
        self.nodes: tuple[NodeView, ...] = ()
        self.lost: frozenset[str] = frozenset()  # Ray says that they live, and nothing answers
        self._seen: set[str] = set()
        self._closed: set[str] = set()

    @property
    def open(self) -> tuple[NodeView, ...]:
        """Without those on which Ray puts nothing more."""
        return tuple(node for node in self.nodes if node.node_id not in self._closed)

    async def run(self) -> None:
        """Reads until cancelled; while Ray's head does not answer the last view stands."""
        while True:
            reading = asyncio.ensure_future(asyncio.to_thread(read_nodes))
            while not reading.done():
                await asyncio.wait({reading}, timeout=READ_TIMEOUT_S)
                if not reading.done():
                    log.warning("Ray's head has not named its nodes for %g s", READ_TIMEOUT_S)
            try:
                nodes = reading.result()
            except (RayError, RuntimeError, OSError) as error:
                log.warning("Ray's head names no nodes: %s", error)
            else:
                still_lost = [node for node in nodes if node.node_id in self.lost]
                answers = await _answering(still_lost)
                self.lost = (self.lost - answers) & {node.node_id for node in nodes}
                self._seen |= {node.node_id for node in nodes}
                self.nodes = tuple(node for node in nodes if node.node_id not in self.lost)
            await asyncio.sleep(READ_PERIOD_S)

    async def close(self, node: str, owners_id: str) -> str:
        """Has Ray put nothing more on a node, named by address or host name; its id. Ray's process
        there ends as soon as nothing runs. What is put on others already is not moved.

        Raises:
            ValueError: it names several.
            UnknownWorkerError: it names none.
            RoleChangeRefusedError: it is the owner's, `owners_id`, or Ray refuses.
        """
        found = find_node(await asyncio.to_thread(read_nodes), node)
        if found.node_id == owners_id:
            raise RoleChangeRefusedError(
                f"node {node} is where the service was started: end the service instead, "
                "with `legato stop`"
            )
        accepted, reason = await asyncio.to_thread(_drain, found.node_id)
        if not accepted:
            raise RoleChangeRefusedError(f"Ray does not drain node {node}: {reason}")
        self._closed.add(found.node_id)
        log.info("node %s (%s) is drained", found.host_name, found.address)
        return found.node_id

    async def look_at(self, node_ids: Iterable[str]) -> frozenset[str]:
        """Those of `node_ids` that are lost. Ray itself takes some 15 s to notice."""
        known = {node.node_id: node for node in self.nodes}
        asked = [known[node_id] for node_id in node_ids if node_id in known]
        silent = {node.node_id for node in asked} - await _answering(asked)
        if silent:
            log.warning("lost nodes: %s", ", ".join(known[node_id].address for node_id in silent))
            self.lost |= silent
            self.nodes = tuple(node for node in self.nodes if node.node_id not in silent)
        alive = {node.node_id for node in self.nodes}
        return frozenset(node_ids) & self._seen - alive


def _drain(node_id: str) -> tuple[bool, str]:
    """Whether Ray does, and why not. For good, with no deadline: what runs there is ours to end."""
    gcs = ray._private.worker.global_worker.gcs_client  # type: ignore[attr-defined]  # Ray's
    reasons = autoscaler_pb2.DrainNodeReason  # type: ignore[attr-defined]  # generated
    preemption = reasons.Value("DRAIN_NODE_REASON_PREEMPTION")
    answer: tuple[bool, str] = gcs.drain_node(node_id, preemption, "drained by an operator", 0)
    return answer


async def _answering(nodes: list[NodeView]) -> frozenset[str]:
    answers = await asyncio.gather(*(_answers(node.address) for node in nodes))
    return frozenset(n.node_id for n, answer in zip(nodes, answers, strict=True) if answer)


async def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(host, int(port)), PROBE_TIMEOUT_S
        )
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _view(node: dict[str, Any], free: dict[str, dict[str, float]]) -> NodeView:
    return NodeView(
        node_id=node["NodeID"],
        address=f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}",
        total=node["Resources"],
        free=free.get(node["NodeID"], {}),
        labels=node["Labels"],
        host_name=node["NodeManagerHostname"],
    )
