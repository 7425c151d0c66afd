"""Inflicts faults on the processes of a run."""

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from everstep_recovery import processes
from everstep_storm.faults import Kind, Strike

PROBE_SECONDS = 10.0
"""If a system has not ended a stopped process after this time, the benchmark ends it, as a liveness
probe would. This is before the next fault, so that each system can return to its full size.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    kind: Kind
    t: float
    after: float
    """Seconds since the storm began, as planned."""
    pid: int
    """Pid of the rank; 0: none was alive."""


@dataclass(slots=True)
class Striker:
    """Inflicts faults on one run. `root`: the pid of the process that started all others."""

    folder: Path
    root: int
    struck: list[Struck] = field(default_factory=list)
    probed: int = 0
    """Number of stopped processes that the benchmark had to end."""
    _stopped: dict[int, float] = field(default_factory=dict)
    """Pid of a stopped process → when to end it, if it still exists."""

    def strike(self, strike: Strike) -> None:
        ranks = [p for p in processes.list_ranks(self.folder) if p not in self._stopped]
        if not ranks:
            self.struck.append(_note(strike, 0))
            return
        pid = ranks[int(strike.place * len(ranks))]
        if strike.kind is Kind.HANG:
            processes.kill([pid], signal.SIGSTOP)
            self._stopped[pid] = time.monotonic() + PROBE_SECONDS
        else:
            node = strike.kind is Kind.NODE
            processes.kill(processes.list_node(self.root, pid) if node else [pid])
        self.struck.append(_note(strike, pid))

    def probe(self) -> None:
        """End the stopped processes that have been stopped for PROBE_SECONDS."""
        for pid in [p for p, end in self._stopped.items() if time.monotonic() > end]:
            del self._stopped[pid]
            if pid in processes.list_own(self.folder):
                self.probed += 1
                processes.kill([pid])


def _note(strike: Strike, pid: int) -> Struck:
    return Struck(kind=strike.kind, t=time.monotonic(), after=strike.after, pid=pid)
