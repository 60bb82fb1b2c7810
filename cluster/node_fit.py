"""NodeFit: whether any one node of a cluster can hold a worker, ever or now. Pure rules.

Ray itself says nothing of an actor that fits nowhere, and sums over the cluster mislead: two nodes
with half a worker's GPUs each hold no worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.cluster.errors import shown
from legato.cluster.resource_demand import amount_text, label_matches, label_text
from legato.cluster.role_change import UnknownWorkerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from legato.cluster.resource_demand import ResourceDemand

MAX_NAMED = 16  # nodes, in a sentence
_GRAIN = 1e-4 / 2  # Ray counts in ten-thousandths


@dataclass(frozen=True)
class NodeView:
    """A live node: what it has of each resource, what of that nobody holds, and its labels."""

    node_id: str
    address: str  # host:port of its raylet
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str]
    host_name: str = ""


def find_node(nodes: Iterable[NodeView], name: str) -> NodeView:
    """The one at this address, or of this host name.

    Raises:
        ValueError: no name, or several are.
        UnknownWorkerError: none is.
    """
    if not name:
        raise ValueError("node is empty, limit at least 1 character: its address or host name")
    nodes = list(nodes)
    found = [node for node in nodes if _host(node) == name]
    found = found or [node for node in nodes if node.host_name == name]
    if len(found) > 1:
        addresses = ", ".join(sorted(_host(node) for node in found))
        raise ValueError(f"node is {shown(name)}, limit what names 1 node: it names {addresses}")
    if not found:
        there = ", ".join(sorted(_host(node) for node in nodes)[:MAX_NAMED])
        raise UnknownWorkerError(
            f"no node of the cluster has the address or host name {shown(name)}; there are {there}"
        )
    return found[0]


def _host(node: NodeView) -> str:
    return node.address.rpartition(":")[0]


def holders(demand: ResourceDemand, nodes: Iterable[NodeView]) -> list[NodeView]:
    """The nodes that could hold such a worker if nothing else ran there."""
    return [
        node
        for node in nodes
        if demand.labels_match(node.labels) and _covers(node.total, demand.amounts())
    ]


def never_fits(role: str, demand: ResourceDemand, nodes: Sequence[NodeView]) -> str:
    """Why no node as it is now could ever hold one worker; empty where one could."""
    if holders(demand, nodes):
        return ""
    needs = ", ".join(demand.parts())
    return f"no node of the cluster can hold a {role} worker, which needs {needs}: " + (
        _shortfall(demand, nodes)
    )


def waits_for(role: str, demand: ResourceDemand, nodes: Sequence[NodeView]) -> str:
    """What a worker that has no place now waits for; empty where some node has room for it."""
    able = holders(demand, nodes)
    if not able:
        return f"waiting for a node: {never_fits(role, demand, nodes)}"
    amounts = demand.amounts()
    if any(_covers(node.free, amounts) for node in able):
        return ""
    most = {name: _freest(name, able) for name in amounts}
    scarce = {n: node for n, node in most.items() if node.free.get(n, 0.0) < amounts[n] - _GRAIN}
    if not scarce:
        return f"waiting for room: no node has {', '.join(demand.parts())} free at once"
    needs = ", ".join(amount_text(name, amounts[name]) for name in scarce)
    free = ", ".join(
        f"{amount_text(name, node.free.get(name, 0.0))} of "
        f"{amount_text(name, node.total[name]).partition('=')[2]}"
        for name, node in scarce.items()
    )
    return f"waiting for room: a {role} worker needs {needs}; the most free on one node is {free}"


def too_many(workers: Mapping[str, tuple[int, ResourceDemand]], nodes: Sequence[NodeView]) -> str:
    """Why all these workers (role: how many, what each asks) never run together; empty if they may.

    By sums: exact where there is one node.
    """
    asked: dict[str, float] = {}
    for count, demand in workers.values():
        for name, amount in demand.amounts().items():
            asked[name] = asked.get(name, 0.0) + count * amount
    for name, amount in asked.items():
        has = sum(node.total.get(name, 0.0) for node in nodes)
        if has < amount - _GRAIN:
            number = sum(count for count, demand in workers.values() if name in demand.amounts())
            return (
                f"{number} workers need {amount_text(name, amount)} together: "
                f"this machine has {amount_text(name, has)}"
            )
    return ""


def _freest(name: str, nodes: Sequence[NodeView]) -> NodeView:
    return max(nodes, key=lambda node: node.free.get(name, 0.0))


def _covers(has: Mapping[str, float], amounts: Mapping[str, float]) -> bool:
    return all(has.get(name, 0.0) >= amount - _GRAIN for name, amount in amounts.items())


def _shortfall(demand: ResourceDemand, nodes: Sequence[NodeView]) -> str:
    """Of everything that no single node has enough of, the most that one has."""
    short = []
    for name, amount in demand.amounts().items():
        most = max((node.total.get(name, 0.0) for node in nodes), default=0.0)
        if most < amount - _GRAIN:
            short.append(amount_text(name, most))
    lacks = [f"the most on any node is {', '.join(short)}"] if short else []
    for key, condition in demand.labels:
        if not any(label_matches(node.labels.get(key), condition) for node in nodes):
            lacks.append(f"none has {label_text(key, condition)}")
    return ", ".join(lacks) or "none has all of it at once"
