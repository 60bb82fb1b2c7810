"""MachineLoad: how much of the machine others took while something was measured."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class MachineLoad:
    """CPU seconds since some start: of all cores, and of some processes with all their threads."""

    busy_s: float  # also what the hypervisor took
    idle_s: float
    process_s: float

    @classmethod
    def now(cls, *process_ids: int) -> MachineLoad:
        """As of now; a process that is gone has used nothing."""
        times = psutil.cpu_times()
        busy = ("user", "nice", "system", "irq", "softirq", "steal")
        idle = ("idle", "iowait")
        process_s = 0.0
        for process_id in process_ids:
            with suppress(psutil.NoSuchProcess):
                own = psutil.Process(process_id).cpu_times()
                process_s += own.user + own.system
        return cls(
            busy_s=sum(getattr(times, name, 0.0) for name in busy),
            idle_s=sum(getattr(times, name, 0.0) for name in idle),
            process_s=process_s,
        )

    def others_share(self, end: MachineLoad) -> float:
        """Of all CPU time from here to `end`, what was neither idle nor the process's: 0 to 1."""
        busy_s, idle_s = end.busy_s - self.busy_s, end.idle_s - self.idle_s
        if busy_s + idle_s <= 0:
            return 0.0
        others_s = busy_s - (end.process_s - self.process_s)
        return min(1.0, max(0.0, others_s / (busy_s + idle_s)))
