"""Finds the process that holds a GPU, from outside the container, as a driver does."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep_contract.env import AGENT_SOCKET
from everstep_lab import procs


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One process of a container. `env` is the environment with which it was started."""

    pid: int
    parent: int
    age: float
    """Seconds since its start."""
    env: Mapping[str, str]


def choose_holder(
    main: int, candidates: Sequence[Candidate], *, position: int, gpus: int
) -> Candidate | None:
    """The process that uses GPU number `position` (from 0) of the container's `gpus` GPUs.

    A worker is a process that has an agent's socket in its environment while its parent has none.
    GPUs are assigned to the workers in the order of their local ranks. In a container without
    workers, the main process holds all GPUs.
    """
    known = {candidate.pid: candidate for candidate in candidates}
    workers = [
        candidate
        for candidate in candidates
        if AGENT_SOCKET in candidate.env
        and AGENT_SOCKET not in getattr(known.get(candidate.parent), "env", {})
    ]
    if not workers:
        return known.get(main)
    workers.sort(key=lambda worker: (_local_rank(worker), worker.pid))
    return workers[min(position * len(workers) // max(gpus, 1), len(workers) - 1)]


def _local_rank(worker: Candidate) -> int:
    text = worker.env.get("LOCAL_RANK", "")
    return int(text) if text.isdigit() else 0


def list_candidates(shim: int) -> list[Candidate]:
    """Every process of the container with this shim."""
    found = []
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    for pid in procs.descendants(shim):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            raw = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            env = dict(entry.decode(errors="replace").partition("=")[::2] for entry in raw if entry)
            started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            found.append(Candidate(pid=pid, parent=int(fields[1]), age=uptime - started, env=env))
    return found
