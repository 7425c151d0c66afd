"""Whether the kernel ended a process of this container because memory ran out.

It counts such ends per cgroup, and raises the count before it sends SIGKILL, so that whoever reaps the process sees it
(Linux, `mm/oom_kill.c`, `__oom_kill_process`). Cgroup v2 has the count in `memory.events`, cgroup v1 in
`memory.oom_control`.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from everstep_agent.pod.proc_stat import read_text

RECENT_SECONDS = 5.0
"""A worker that SIGKILL ended so soon after the count has risen was ended by the kernel."""
UNLIMITED_BYTES = 2**60
"""Cgroup v1 shows the largest multiple of a page instead of "max"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """The files of this process's memory cgroup."""

    events: Path
    limit: Path


def find_group(
    mounts: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> MemoryGroup | None:
    """None: the kernel does not tell.

    In a container the mount may show its own cgroup at the top, whatever path `own` names.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    if "memory" in paths:
        top, path, files = mounts / "memory", paths["memory"], _V1
    else:
        top, path, files = mounts, paths.get("", "/"), _V2
    for folder in (top / path.lstrip("/"), top):
        group = MemoryGroup(events=folder / files[0], limit=folder / files[1])
        if group.events.exists():
            return group
    return None


_V1 = ("memory.oom_control", "memory.limit_in_bytes")
_V2 = ("memory.events", "memory.max")


class OutOfMemory:
    def __init__(self, group: MemoryGroup | None) -> None:
        self._group = group
        self._count = self._read_count()
        self._rose_at = -math.inf

    def look(self, now: float) -> None:
        """Note whether the count has risen. Called often: only a recent rise explains a death."""
        count = self._read_count()
        if count > self._count:
            self._rose_at = now
        self._count = count

    def explain(self, now: float) -> str:
        """What to say of a worker that SIGKILL has just ended. Empty: memory was not the reason."""
        self.look(now)
        if now - self._rose_at > RECENT_SECONDS:
            return ""
        limit = self._read_limit()
        if limit is None:
            return "out of memory: its node has none left; use less memory in the script"
        text = f"{limit / 2**30:.1f} GiB" if limit >= 2**30 else f"{limit / 2**20:.0f} MiB"
        return (
            f"out of memory: raise resources.limits.memory of the container, which is {text}, "
            "or use less memory in the script"
        )

    def _read_count(self) -> int:
        if self._group is None:
            return 0
        try:
            lines = read_text(str(self._group.events)).splitlines()
        except OSError:
            return 0
        return next(
            (int(n) for key, _, n in (x.partition(" ") for x in lines) if key == "oom_kill"), 0
        )

    def _read_limit(self) -> int | None:
        try:
            text = read_text(str(self._group.limit)).strip() if self._group else ""
        except OSError:
            return None
        return int(text) if text.isdigit() and int(text) < UNLIMITED_BYTES else None
