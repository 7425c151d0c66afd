"""The faults that a run can get. Pure."""

import signal
from dataclasses import dataclass

SETTLED_STEPS = 12
"""Steps before the first fault. They include the first checkpoint, so that no system restarts from
step 1.
"""
LEARNT_STEPS = 65
"""After this many steps Everstep has learnt how long a step takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    signal: signal.Signals
    ranks: int = 1
    """How many ranks get the signal."""
    node: bool = False
    """All processes of the rank's node get the signal."""

    @property
    def stops(self) -> bool:
        """The processes stand still instead of ending, and their connections stay open."""
        return self.signal is signal.SIGSTOP

    @property
    def warm_up(self) -> int:
        """Steps before the fault. Processes that are stopped are found by limits that Everstep must
        have learnt.
        """
        return LEARNT_STEPS if self.stops else SETTLED_STEPS


NODE = "node without power"
FAULTS = {
    "SIGKILL": Fault(signal=signal.SIGKILL),
    "SIGSTOP": Fault(signal=signal.SIGSTOP),
    "SIGSEGV": Fault(signal=signal.SIGSEGV),
    "SIGKILL of two": Fault(signal=signal.SIGKILL, ranks=2),
    NODE: Fault(signal=signal.SIGSTOP, node=True),
}
"""To the other nodes, a node without power looks like one whose processes are stopped: it sends
nothing, and its connections stay open.
"""
