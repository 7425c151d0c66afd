"""The demo's acts, their milestones and measurements, as values."""

from dataclasses import dataclass, field

from everstep_demo.steplog import Logs

CORDONED = "cordoned"
COMMITTED = "committed"
MOVED = "moved"
FIRST_STEP = "first new step"
"""The first step of the first epoch that the fault causes."""
FULL_SIZE = "full size"
"""The first step taken by as many workers as before, not counting the one that the fault hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One fault on the node that runs the pod of `slot`."""

    title: str
    """Empty if the act is part of a section with its own heading."""
    slot: int
    gpu_fault: str = ""
    """The fault's name in the report."""
    xid: int = 0
    number: int = 0
    """Number of the act, from 1; 0 for a single act."""
    saves: bool = False
    """Whether the worker saves before it leaves."""
    pod_stays: bool = False
    """Whether the next worker runs in the same pod."""

    @property
    def heading(self) -> str:
        return f"Act {self.number}: {self.title}" if self.number else self.title


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One act as observed from outside; `reached` maps a milestone to seconds after the fault."""

    act: Act
    node: str
    moved_to: str
    reached: dict[str, float]
    resumed_from: int
    """Step after which the job continued."""
    steps_lost: int | None
    """Steps that a surviving rank had applied and that were rolled back; None if unknown."""
    steps_recomputed: int | None = None
    """Steps that a rank applied a second time; None if unknown."""
    others_pause: float | None = None
    """Longest time between two steps of the other workers, from the fault to the full size, in
    seconds; None if unknown.
    """
    usual_pause: float | None = None
    """Median of the same before the fault."""
    shrunk_pause: float | None = None
    """Median of the same from the first new step to the full size."""

    @property
    def missed(self) -> list[str]:
        """Milestones that were not reached in time."""
        awaited = [CORDONED, MOVED, FIRST_STEP, FULL_SIZE, *([COMMITTED] if self.act.saves else [])]
        return [m for m in awaited if m not in self.reached]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The report's input, besides the comparison of the two runs."""

    incidents: tuple[Incident, ...]
    quarantined_nodes: tuple[str, ...]
    goodput: float
    completed: bool
    seconds: float
    logs: Logs
    """The training script's own log, compared with the undisturbed run's."""
    tensors: int
    """Number of tensors of the last checkpoint that were compared with the undisturbed run's."""
    tensor_differences: tuple[str, ...] = field(default=())
    problems: tuple[str, ...] = field(default=())


ACTS = (
    Act(
        number=1,
        title="a GPU fails and still computes: XID 64, row remap failure",
        slot=1,
        gpu_fault="XID 64, row remap failure",
        saves=True,
        xid=64,
    ),
    Act(
        number=2,
        title="a GPU falls off the bus: XID 79",
        slot=2,
        gpu_fault="XID 79, GPU has fallen off the bus",
        xid=79,
    ),
)
