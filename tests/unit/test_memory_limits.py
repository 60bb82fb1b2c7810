"""Limits of control groups, from folders as the kernel shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from legato.worker import device_memory
from legato.worker.device_memory import free_bytes, peak_growth, total_bytes
from legato.worker.memory_limits import MemoryLimit, memory_limits

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def v2(folder: str, limit: str, used: int, inactive: int) -> dict[str, str]:
    return {
        f"sys/fs/cgroup/{folder}/memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{folder}/memory.current": f"{used}\n",
        f"sys/fs/cgroup/{folder}/memory.stat": f"anon 1\ninactive_file {inactive}\n",
    }


def v1(folder: str, limit: int, used: int, inactive: int) -> dict[str, str]:
    start = f"sys/fs/cgroup/memory/{folder}"
    return {
        f"{start}/memory.limit_in_bytes": f"{limit}\n",
        f"{start}/memory.usage_in_bytes": f"{used}\n",
        # The group's own, without those below it: not what counts.
        f"{start}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


def test_every_group_up_to_the_mount_counts(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/a.slice/b.scope\n"})
    write(tmp_path, v2("a.slice/b.scope", "max", 50, 0))
    write(tmp_path, v2("a.slice", "1000", 700, 200))
    assert memory_limits(tmp_path) == [MemoryLimit(1000, 500)]
    assert memory_limits(tmp_path)[0].free_bytes == 500


def test_a_container_that_sees_its_own_group_only(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n"})
    write(tmp_path, v1(".", 4096, 4500, 300))
    assert memory_limits(tmp_path) == [MemoryLimit(4096, 4200)]
    assert memory_limits(tmp_path)[0].free_bytes == 0  # over its limit: nothing, not less


def test_groups_outside_the_container_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "root", {"proc/self/cgroup": "0::/../../other\n"})
    write(tmp_path, v2("other", "10", 1, 0))
    assert memory_limits(tmp_path / "root") == []


def test_no_groups_no_limits(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == []


def test_free_memory_is_the_least_of_machine_and_groups(tmp_path: Path) -> None:
    meminfo = "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    4000 kB\n"
    write(tmp_path, {"proc/meminfo": meminfo})
    assert free_bytes(CPU, tmp_path) == 4000 * 1024
    write(tmp_path, {"proc/self/cgroup": "0::/g\n"} | v2("g", str(8000 * 1024), 5000 * 1024, 0))
    assert free_bytes(CPU, tmp_path) == 3000 * 1024
    assert total_bytes(CPU, tmp_path) == 8000 * 1024
    assert total_bytes(CPU, tmp_path / "none") >= total_bytes(CPU) > 0


def test_a_system_that_does_not_say_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs /proc/meminfo, .*: give kv_memory_bytes"):
        free_bytes(CPU, tmp_path)
    write(tmp_path, {"proc/meminfo": "MemFree: 1 kB\n"})
    with pytest.raises(ValueError, match="needs MemAvailable, which this system does not tell"):
        free_bytes(CPU, tmp_path)


def test_a_peak_counts_though_it_is_given_back() -> None:
    def run() -> None:
        torch.ones(64 * MIB, dtype=torch.uint8)

    kept = torch.ones(100 * MIB, dtype=torch.uint8)  # there before: does not count
    assert 62 * MIB <= peak_growth(run, CPU) <= 72 * MIB
    assert peak_growth(lambda: None, CPU) <= 8 * MIB
    del kept
    assert 62 * MIB <= peak_growth(run, CPU) <= 72 * MIB


def test_a_peak_that_cannot_be_measured_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_memory, "Path", lambda name: tmp_path / "absent" / name.lstrip("/"))
    with pytest.raises(ValueError, match=r"needs /proc/self/clear_refs .*: give kv_memory_bytes"):
        peak_growth(lambda: None, CPU)
