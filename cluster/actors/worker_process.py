"""WorkerProcess: the process of a worker's actor, which is made sure to end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from legato.cluster.actors.calls import CALL_TIMEOUT_S

KILL_CHECK_S = 2.0


@dataclass(frozen=True)
class WorkerProcess:
    """Where it is, and since when its pid is its own."""

    node_id: str
    pid: int
    created_s: float


async def make_sure_it_ended(process: WorkerProcess, *, at_once: bool = False) -> None:
    """Ray reports a killed actor dead at once, even where its process is stopped and lives on.

    `at_once`: Ray cannot be asked to kill it.
    """
    if not at_once:
        await asyncio.sleep(KILL_CHECK_S)
    if process.node_id == ray.get_runtime_context().get_node_id():
        end_process(process)
        return
    there = NodeAffinitySchedulingStrategy(process.node_id, soft=False)
    task = ray.remote(end_process).options(num_cpus=0, scheduling_strategy=there)
    await asyncio.wait_for(task.remote(process), CALL_TIMEOUT_S)


def end_process(process: WorkerProcess) -> None:
    """Kills a process of this machine, unless it has ended."""
    try:
        found = psutil.Process(process.pid)
        if abs(found.create_time() - process.created_s) < 1:  # else the pid has been reused
            found.kill()
    except psutil.NoSuchProcess:
        return
