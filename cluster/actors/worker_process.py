"""WorkerProcess: the process of a worker's actor, which is made sure to end."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from legato.cluster.actors.calls import CALL_TIMEOUT_S, first_sentence, result_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerProcess:
    """Where it is, and since when its pid is its own."""

    node_id: str
    pid: int
    created_s: float


async def make_sure_it_ended(process: WorkerProcess) -> None:
    """Ray reports a killed actor dead at once, even where its process is stopped and lives on."""
    if process.node_id == ray.get_runtime_context().get_node_id():
        end_process(process)
        return
    there = NodeAffinitySchedulingStrategy(process.node_id, soft=False)
    task = ray.remote(end_process).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        await asyncio.wait_for(result_of(task.remote(process)), CALL_TIMEOUT_S)
    except (RayError, TimeoutError) as error:  # its node has gone too, and takes it along
        told = first_sentence(str(error)) or f"no answer within {CALL_TIMEOUT_S:g} s"
        log.warning("process %d on node %s: not seen to end: %s", process.pid, there.node_id, told)


def end_process(process: WorkerProcess) -> None:
    """Kills a process of this machine, unless it has ended."""
    try:
        found = psutil.Process(process.pid)
        if abs(found.create_time() - process.created_s) < 1:  # else the pid has been reused
            found.kill()
    except psutil.NoSuchProcess:
        return
