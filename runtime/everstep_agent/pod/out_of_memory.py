"""Whether the kernel's OOM killer ended a process of this container.

The kernel counts OOM kills per cgroup. It increases the count before it sends SIGKILL, so the count
has risen by the time the process is reaped (Linux, `mm/oom_kill.c`, `__oom_kill_process`). Cgroup
v2 has the count in `memory.events`, cgroup v1 in `memory.oom_control`.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from everstep_agent.cgroups import MOUNTS, OWN, find_files
from everstep_agent.pod.proc_stat import read_text

RECENT_SECONDS = 5.0
"""If SIGKILL ends a worker within this time after the count has risen, the OOM killer sent it."""
UNLIMITED_BYTES = 2**60
"""Cgroup v1 shows the largest multiple of a page instead of "max"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """The files of this process's memory cgroup."""

    events: Path
    limit: Path


def find_group(mounts: Path = MOUNTS, own: Path = OWN) -> MemoryGroup | None:
    """The memory cgroup of this process; None: the kernel does not show one."""
    found = find_files("memory", _V1, _V2, mounts, own)
    return MemoryGroup(events=found[0], limit=found[1]) if found else None


_V1 = ("memory.oom_control", "memory.limit_in_bytes")
_V2 = ("memory.events", "memory.max")


class OutOfMemory:
    def __init__(self, group: MemoryGroup | None) -> None:
        self._group = group
        self._count = 0
        self._count = self._read_count()
        self._rose_at = -math.inf

    def look(self, now: float) -> None:
        """Note whether the count has risen. Call it often: only a recent rise explains a death."""
        count = self._read_count()
        if count > self._count:
            self._rose_at = now
        self._count = count

    def explain(self, now: float) -> str:
        """Why SIGKILL has just ended a worker, for a message; empty: memory was not the reason."""
        self.look(now)
        if now - self._rose_at > RECENT_SECONDS:
            return ""
        limit = self._read_limit()
        if limit is None:
            return (
                "out of memory: the container has no limit of its own, so its node, or a cgroup above it, has none "
                "left; use less memory in the script"
            )
        text = f"{limit / 2**30:.1f} GiB" if limit >= 2**30 else f"{limit / 2**20:.0f} MiB"
        return (
            f"out of memory: raise resources.limits.memory of the container, which is {text}, "
            "or use less memory in the script"
        )

    def _read_count(self) -> int:
        """The same as before if the kernel does not show it now."""
        if self._group is None:
            return self._count
        try:
            lines = read_text(str(self._group.events)).splitlines()
        except OSError:
            return self._count
        counts = dict(line.split() for line in lines)
        return int(counts.get("oom_kill", self._count))

    def _read_limit(self) -> int | None:
        try:
            text = read_text(str(self._group.limit)).strip() if self._group else ""
        except OSError:
            return None
        return int(text) if text.isdigit() and int(text) < UNLIMITED_BYTES else None
