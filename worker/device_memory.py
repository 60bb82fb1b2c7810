"""device_memory: how much memory a device has, how much of it is free, and what a run takes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from legato.worker.memory_limits import host_total_bytes, memory_limits
from legato.worker.spare_memory import give_back_freed

if TYPE_CHECKING:
    from collections.abc import Callable


def total_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """All that this process may ever have, in use or not."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return host_total_bytes(root)


def free_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """What nobody uses now, or uses only as a cache of files.

    Raises:
        ValueError: this system does not say.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        meminfo = (root / "proc/meminfo").read_text(encoding="ascii")
    except OSError as error:
        raise ValueError(
            "kv_memory_fraction needs /proc/meminfo, which only Linux has "
            f"(this is {sys.platform}): give kv_memory_bytes"
        ) from error
    available = _kilobytes(meminfo, "MemAvailable")
    return min([available, *(limit.free_bytes for limit in memory_limits(root))])


def peak_growth(run: Callable[[], None], device: torch.device) -> int:
    """Bytes that `run` takes at most beside what is taken now, whether it gives them back or not.

    Other threads must be idle meanwhile.

    Raises:
        ValueError: this system does not tell a process's peak, or lets nobody reset it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - int(before)
    give_back_freed()  # else the run would use it again, and not grow
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        raise ValueError(
            "kv_memory_fraction needs /proc/self/clear_refs to measure what a step takes "
            f"({error.strerror}): give kv_memory_bytes"
        ) from error
    before = _kilobytes(_own_status(), "VmRSS")
    run()
    return max(0, _kilobytes(_own_status(), "VmHWM") - before)


def _own_status() -> str:
    return Path("/proc/self/status").read_text(encoding="utf-8")


def _kilobytes(text: str, name: str) -> int:
    """In bytes, of a line such as `MemAvailable:  123 kB`."""
    match = re.search(rf"^{name}:\s+(\d+) kB$", text, flags=re.MULTILINE)
    if match is None:
        raise ValueError(
            f"kv_memory_fraction needs {name}, which this system does not tell: "
            "give kv_memory_bytes"
        )
    return int(match[1]) * 1024
