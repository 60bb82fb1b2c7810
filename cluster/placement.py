"""Placement: where workers listen, and what each asks of the machine. Pure rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.cluster.config import ServiceConfig

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ClusterFacts:
    """What is known of the Ray cluster when the service starts."""

    joined: bool  # False: a Ray of our own, on this machine
    num_nodes: int
    num_gpus: float
    num_cores: int  # of this machine, as far as this process may use them


@dataclass(frozen=True)
class WorkerPlacement:
    """The same for every worker of a service. `host` None: the own address of its node."""

    host: str | None
    device: str
    cpus: float
    gpus: float
    num_threads: int
    sharers: int  # workers that share the memory of one machine or GPU, itself included


def place(config: ServiceConfig, facts: ClusterFacts) -> WorkerPlacement:
    """Chooses the placement.

    Raises:
        ValueError: the machine can never offer what is asked.
    """
    num_workers = max(1, config.num_workers)
    cpus = config.worker_cpus
    if cpus is None:
        cpus = 1.0 if facts.joined else 0.0
    device, gpus = _device(config, facts, num_workers)
    if gpus * num_workers > facts.num_gpus and not facts.joined:
        raise ValueError(
            f"{num_workers} workers of {gpus:g} GPU each need {gpus * num_workers:g} GPUs: this "
            f"machine has {facts.num_gpus:g}. Use --device cpu, or a smaller --worker-gpus"
        )
    return WorkerPlacement(
        host=_host(config, facts),
        device=device,
        cpus=cpus,
        gpus=gpus,
        num_threads=_num_threads(config, facts, cpus, num_workers),
        sharers=_sharers(facts, device, gpus, num_workers),
    )


def _device(config: ServiceConfig, facts: ClusterFacts, num_workers: int) -> tuple[str, float]:
    device, gpus = config.engine.device, config.worker_gpus
    if device.startswith("cuda"):
        return device, 1.0 if gpus is None else gpus
    if device == "cpu":
        return device, gpus or 0.0
    # auto. The choice is made here and not in the worker: Ray leaves all GPUs visible to an actor
    # that asked for none, and such a worker would take one that Ray promised to another.
    if gpus is None:
        whole = facts.num_gpus >= num_workers
        gpus = 1.0 if whole else _share(facts.num_gpus, num_workers)
    return ("cuda", gpus) if gpus else ("cpu", 0.0)


def _share(num_gpus: float, num_workers: int) -> float:
    """An equal part of too few GPUs, such that every GPU holds a whole number of workers."""
    if num_gpus < 1:
        return 0.0
    workers_per_gpu = -(-num_workers // int(num_gpus))
    return int(10_000 / workers_per_gpu) / 10_000  # Ray counts in ten-thousandths


def _host(config: ServiceConfig, facts: ClusterFacts) -> str | None:
    if config.worker_host != "auto":
        return config.worker_host
    return None if facts.joined and facts.num_nodes > 1 else LOOPBACK


def _num_threads(config: ServiceConfig, facts: ClusterFacts, cpus: float, num_workers: int) -> int:
    if config.engine.num_threads is not None:
        return config.engine.num_threads
    if cpus > 1:
        return int(cpus)  # what Ray has set aside for it
    return max(1, facts.num_cores // num_workers)


def _sharers(facts: ClusterFacts, device: str, gpus: float, num_workers: int) -> int:
    if device.startswith("cuda") and gpus > 0:
        return max(1, int(1 / gpus + 1e-9))  # as many as Ray puts on one GPU
    return -(-num_workers // max(1, facts.num_nodes))  # Ray spreads them
