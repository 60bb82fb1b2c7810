"""memory_limits: what the process's control groups let it have of the machine's memory."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class MemoryLimit:
    """Of one control group, in bytes."""

    limit_bytes: int
    used_bytes: int  # by all in it, without files' pages that the kernel would drop for room

    @property
    def free_bytes(self) -> int:
        """What is left."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class _Files:
    """Names in a group's folder; those of the two versions differ."""

    limit: str
    usage: str
    inactive_file: str  # a line of memory.stat


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def host_total_bytes(root: Path = Path("/")) -> int:
    """All that this process may ever have of the machine's memory, in use or not."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit.limit_bytes for limit in memory_limits(root))])


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Those of the process's groups and of all above them, as far as they can be seen.

    [] where there are none, as outside Linux. In a container the folders are those of its own
    group, whatever path the kernel names.
    """
    found = []
    for folder, files in _folders(root):
        try:
            limit = (folder / files.limit).read_text(encoding="ascii").strip()
            used = int((folder / files.usage).read_text(encoding="ascii"))
            stat = (folder / "memory.stat").read_text(encoding="ascii")
        except OSError:
            continue  # not there: the root has no limit, and a container sees its own part only
        if limit == "max":
            continue
        inactive = re.search(rf"^{files.inactive_file} (\d+)$", stat, flags=re.MULTILINE)
        droppable = 0 if inactive is None else int(inactive[1])
        found.append(MemoryLimit(int(limit), max(0, used - droppable)))
    return found


def _folders(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The groups' folders, each followed by those above it up to the mount."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, files = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mount, files = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        group = Path(path.lstrip("/"))
        for part in (group, *group.parents):  # ends with Path("."): the mount
            if ".." not in part.parts:  # a group outside the container's
                yield mount / part, files
