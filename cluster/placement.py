"""Placement: where workers listen, and what those of each role ask of a node. Pure rules."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.cluster.node_fit import holders, never_fits, too_many
from legato.cluster.roles import ROLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.cluster.config import ServiceConfig
    from legato.cluster.control_plane import Role
    from legato.cluster.node_fit import NodeView
    from legato.cluster.resource_demand import ResourceDemand

LOOPBACK = "127.0.0.1"
_REMEDY = (
    "Ask for less with --device cpu, --worker-gpus, --worker-cpus or the resources of a "
    "role (--decode-resources), or join a cluster with --ray-address"
)


@dataclass(frozen=True)
class ClusterFacts:
    """What is known of the Ray cluster when the service starts."""

    joined: bool  # False: a Ray of our own, on this machine
    nodes: tuple[NodeView, ...]
    num_cores: int  # of this machine, as far as this process may use them


@dataclass(frozen=True)
class WorkerPlacement:
    """The same for every worker of a role. `host` None: the own address of its node."""

    host: str | None
    device: str
    demand: ResourceDemand  # complete: `cpus` and `gpus` are numbers
    num_threads: int
    sharers: int  # workers that share the memory of one machine or GPU, itself included


@dataclass(frozen=True)
class _Wish:
    """What is asked for one role, before its device is chosen. `demand.gpus` None: not said."""

    role: Role
    num_workers: int
    demand: ResourceDemand
    able: tuple[NodeView, ...]  # nodes that have all the rest of it


def place(config: ServiceConfig, facts: ClusterFacts) -> dict[Role, WorkerPlacement]:
    """Chooses the placement of each role.

    Raises:
        ValueError: the options contradict each other, or a Ray of our own can never offer what is
            asked. A joined cluster may grow: there the controller says what is waited for.
    """
    sizes, asked = config.pool_sizes, config.resources
    wishes = [_wish(role, sizes[role], asked[role], config, facts) for role in ROLES]
    chosen = {wish.role: _device(config, wish, wishes) for wish in wishes}
    demands = {
        wish.role: dataclasses.replace(wish.demand, gpus=chosen[wish.role][1]) for wish in wishes
    }
    if not facts.joined:
        _check_own(wishes, demands, facts)
    return {
        wish.role: WorkerPlacement(
            host=_host(config, facts),
            device=chosen[wish.role][0],
            demand=demands[wish.role],
            num_threads=_num_threads(config, facts, demands[wish.role]),
            sharers=_sharers(wish, wishes, chosen, facts),
        )
        for wish in wishes
    }


def check_own(config: ServiceConfig) -> None:
    """Raises ValueError where the options ask for what no Ray of our own has."""
    for role, asked in config.resources.items():
        parts = dataclasses.replace(asked, cpus=None, gpus=None, memory_bytes=None).parts()
        if parts:
            raise ValueError(
                f"--{role}-resources: no node has {', '.join(parts)}: a Ray of our own is this "
                "machine alone, with CPU, GPU and memory; join a cluster with --ray-address"
            )


def _wish(
    role: Role,
    num_workers: int,
    asked: ResourceDemand,
    config: ServiceConfig,
    facts: ClusterFacts,
) -> _Wish:
    cpus, gpus = asked.cpus, asked.gpus
    if cpus is None:
        cpus = config.worker_cpus
    if cpus is None:
        cpus = 1.0 if facts.joined else 0.0
    if gpus is None:
        gpus = config.worker_gpus
    elif gpus == 0 and config.engine.device.startswith("cuda"):
        raise ValueError(
            f"--{role}-resources GPU=0 with --device {config.engine.device}: those workers would "
            "have no GPU; use --device auto, which gives them the CPU"
        )
    demand = dataclasses.replace(asked, cpus=cpus, gpus=gpus)
    without_gpus = dataclasses.replace(demand, gpus=0.0)
    return _Wish(role, num_workers, demand, tuple(holders(without_gpus, facts.nodes)))


def _check_own(
    wishes: list[_Wish], demands: Mapping[Role, ResourceDemand], facts: ClusterFacts
) -> None:
    for role, demand in demands.items():
        if problem := never_fits(role, demand, facts.nodes):
            raise ValueError(f"{problem}. {_REMEDY}")
    workers: dict[str, tuple[int, ResourceDemand]] = {
        wish.role: (wish.num_workers, demands[wish.role]) for wish in wishes
    }
    if problem := too_many(workers, facts.nodes):
        raise ValueError(f"{problem}. {_REMEDY}")


def _device(config: ServiceConfig, wish: _Wish, wishes: list[_Wish]) -> tuple[str, float]:
    """Of one role: the device, and the GPUs that a worker asks for."""
    device, gpus = config.engine.device, wish.demand.gpus
    if device.startswith("cuda"):
        return device, 1.0 if gpus is None else gpus
    if device == "cpu":
        return device, gpus or 0.0
    # auto. The choice is made here and not in the worker: Ray leaves all GPUs visible to an actor
    # that asked for none, and such a worker would take one that Ray promised to another.
    if gpus is None:
        gpus = _auto_gpus(wish, wishes)
    return ("cuda", gpus) if gpus else ("cpu", 0.0)


def _auto_gpus(wish: _Wish, wishes: list[_Wish]) -> float:
    """One GPU a worker where there are enough, else an equal share, of what nobody has claimed."""
    here = {node.node_id for node in wish.able}
    num_gpus = sum(node.total.get("GPU", 0.0) for node in wish.able)
    num_workers = 0
    for other in wishes:
        if not here & {node.node_id for node in other.able}:
            continue
        if other.demand.gpus is None:
            num_workers += other.num_workers
        else:
            num_gpus -= other.num_workers * other.demand.gpus
    return 1.0 if num_gpus >= max(1, num_workers) else _share(num_gpus, num_workers)


def _share(num_gpus: float, num_workers: int) -> float:
    """An equal part of too few GPUs, such that every GPU holds a whole number of workers."""
    if num_gpus < 1:
        return 0.0
    workers_per_gpu = -(-num_workers // int(num_gpus))
    return int(10_000 / workers_per_gpu) / 10_000  # Ray counts in ten-thousandths


def _host(config: ServiceConfig, facts: ClusterFacts) -> str | None:
    if config.worker_host != "auto":
        return config.worker_host
    return None if facts.joined and len(facts.nodes) > 1 else LOOPBACK


def _num_threads(config: ServiceConfig, facts: ClusterFacts, demand: ResourceDemand) -> int:
    if config.engine.num_threads is not None:
        return config.engine.num_threads
    if demand.cpus is not None and demand.cpus > 1:
        return int(demand.cpus)  # what Ray has set aside for it
    return max(1, facts.num_cores // max(1, config.num_workers))


def _sharers(
    wish: _Wish,
    wishes: list[_Wish],
    chosen: Mapping[Role, tuple[str, float]],
    facts: ClusterFacts,
) -> int:
    device, gpus = chosen[wish.role]
    if device.startswith("cuda") and gpus > 0:
        return max(1, int(1 / gpus + 1e-9))  # as many as Ray puts on one GPU
    # Ray spreads each role's workers over the nodes that can hold them.
    crowds = []
    for node in wish.able or facts.nodes:
        crowd = 0.0
        for other in wishes:
            if chosen[other.role][0] == device and node in (other.able or facts.nodes):
                crowd += other.num_workers / len(other.able or facts.nodes)
        crowds.append(crowd)
    return max(1, math.ceil(max(crowds, default=1.0) - 1e-9))
