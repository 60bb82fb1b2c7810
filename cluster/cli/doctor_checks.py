"""What `legato doctor` looks at in a moment: CPU, GPU, memory, disks, limits, ports."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from legato.cluster.cli.connection import is_open
from legato.cluster.errors import ServiceError
from legato.cluster.router_ports import MAX_PORT, check_port, default_http_port

GIB = 1 << 30
GPU_TIMEOUT_S = 15.0


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what mends it."""

    name: str
    level: Level
    text: str
    fix: str = ""


def check_machine(port: int) -> list[Finding]:
    """All that takes no time."""
    flags = _cpu_flags(Path("/proc/cpuinfo"))
    return [
        check_cpu(flags, len(os.sched_getaffinity(0)), compiled=_has_kernels()),
        check_memory(_memory_bytes()),
        check_gpu(_gpus(), _version("torch"), _version("triton")),
        check_disk("disk for models", _hub_folder(), 10 * GIB, 2 * GIB, "set HF_HOME to another"),
        check_disk("disk for Ray", Path("/tmp"), 5 * GIB, 1 * GIB, "free some of it"),
        check_shm(Path("/dev/shm")),
        check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        check_listening(port),
        check_listening(default_http_port(port), name="HTTP port", option="--http-port"),
    ]


def check_cpu(flags: frozenset[str], num_cores: int, *, compiled: bool) -> Finding:
    """`flags` as the kernel names them; `compiled`: Legato's C kernels are there."""
    levels = (
        ("avx512_bf16", "AVX-512 with bf16"),
        ("avx512bw", "AVX-512"),
        ("avx2", "AVX2"),
    )
    found = next((text for flag, text in levels if flag in flags), None)
    text = f"{num_cores} cores, {found or 'no AVX2'}"
    if found is None:
        return Finding(
            "CPU", Level.WARNING, text, "plain torch is used here, many times slower: use another"
        )
    if not compiled:
        return Finding(
            "CPU",
            Level.WARNING,
            f"{text}, and no compiled kernels",
            "install a C compiler, then Legato again: it is several times slower without",
        )
    if num_cores < 2:
        return Finding("CPU", Level.WARNING, text, "two workers want a core each: give it more")
    return Finding("CPU", Level.OK, text)


def check_memory(available: int) -> Finding:
    """Bytes that processes here may still take."""
    text = f"{available / GIB:.1f} GiB available"
    fix = "two workers of the demo model take 2 GiB: end something, or lower --kv-memory"
    if available < 1.5 * GIB:
        return Finding("memory", Level.PROBLEM, text, fix)
    if available < 4 * GIB:
        return Finding("memory", Level.WARNING, text, fix)
    return Finding("memory", Level.OK, text)


def check_gpu(gpus: list[str] | str, torch: str | None, triton: str | None) -> Finding:
    """`gpus`: name and memory of each, or why nobody says; versions of what drives them."""
    if isinstance(gpus, str):
        fix = "see that `nvidia-smi` works, or serve with --device cpu"
        return Finding("GPU", Level.WARNING, gpus, fix)
    if not gpus:
        return Finding("GPU", Level.OK, "none: --device auto takes the CPU")
    text = f"{len(gpus)}: {'; '.join(gpus)}"
    if torch is None or "+cpu" in torch:
        return Finding(
            "GPU",
            Level.PROBLEM,
            f"{text}, and torch {torch or 'is missing'} has no CUDA",
            "pip install a torch with CUDA (https://pytorch.org/get-started), or serve with "
            "--device cpu",
        )
    if triton is None:
        fix = "pip install 'legato[gpu]', or serve with --device cpu"
        return Finding("GPU", Level.PROBLEM, f"{text}, and Triton is missing", fix)
    return Finding("GPU", Level.OK, text)


def check_disk(name: str, folder: Path, enough: int, least: int, fix: str) -> Finding:
    """Free bytes of the file system that `folder` is or would be on."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free in {folder}"
    if not os.access(folder, os.W_OK):
        return Finding(name, Level.PROBLEM, f"{folder} cannot be written", fix)
    if free < enough:
        return Finding(name, Level.PROBLEM if free < least else Level.WARNING, text, fix)
    return Finding(name, Level.OK, text)


def check_shm(folder: Path) -> Finding:
    """Where KV between workers of one machine, and Ray's store, lie."""
    if not folder.is_dir():
        return Finding("shared memory", Level.WARNING, f"no {folder}", "KV goes by gRPC: slower")
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.2g} GiB free in {folder}"
    if free < GIB:
        level = Level.PROBLEM if free < GIB // 4 else Level.WARNING
        fix = "give a container more (docker run --shm-size 2g), or serve with --kv-lane grpc"
        return Finding("shared memory", level, text, fix)
    return Finding("shared memory", Level.OK, text)


def check_files(limit: int) -> Finding:
    """The soft limit of open files; below 0: none."""
    if limit < 0 or limit >= 4096:
        return Finding("open files", Level.OK, "no limit" if limit < 0 else f"{limit:,} at most")
    level = Level.PROBLEM if limit < 1024 else Level.WARNING
    fix = "`ulimit -n 65536` before `legato serve`: each stream and each link takes one"
    return Finding("open files", level, f"{limit:,} at most", fix)


def check_listening(port: int, *, name: str = "port", option: str = "--port") -> Finding:
    """Whether a router could listen on loopback, at what `option` sets."""
    if port > MAX_PORT:
        text = f"{port} is none, {MAX_PORT} is the last"
        return Finding(name, Level.PROBLEM, text, f"choose another with {option}")
    try:
        check_port("127.0.0.1", port, port_option=option)
    except ServiceError as error:
        here = is_open(f"127.0.0.1:{port}", 1.0)
        level = Level.WARNING if here else Level.PROBLEM
        return Finding(name, level, str(error))
    return Finding(name, Level.OK, f"{port} is free")


def _cpu_flags(path: Path) -> frozenset[str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())


def _memory_bytes() -> int:
    """Of the machine, or of the control group, whichever is less."""
    available: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return available
    return min(available, max(0, limit - used))


def _has_kernels() -> bool:
    spec = importlib.util.find_spec("legato.kernels")
    folders = spec.submodule_search_locations if spec is not None else None
    return any(list(Path(folder).glob("native_*.so")) for folder in folders or ())


def _gpus() -> list[str] | str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = "--query-gpu=name,memory.total,memory.free"
    try:
        asked = subprocess.run(
            [command, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=GPU_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not answer: {error}"
    if asked.returncode:
        return f"nvidia-smi: {' '.join((asked.stdout + asked.stderr).split())[:160]}"
    rows = [[word.strip() for word in line.split(",")] for line in asked.stdout.splitlines()]
    return [f"{row[0]}, {row[1]}, {row[2]} free" for row in rows if len(row) == 3]


def _hub_folder() -> Path:
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
