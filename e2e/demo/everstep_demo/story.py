"""What the demo is made of, as values: acts, their milestones, what was measured."""

from dataclasses import dataclass, field

CORDONED = "cordoned"
COMMITTED = "committed"
MOVED = "moved"
FIRST_STEP = "first new step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One fault on the node that holds `slot`."""

    title: str
    """Empty where the act is part of something that has a heading."""
    slot: int
    gpu_fault: str = ""
    """As the report names it."""
    xid: int = 0
    number: int = 0
    """Of the acts of a play, from 1; 0 stands alone."""

    @property
    def heading(self) -> str:
        return f"Act {self.number}: {self.title}" if self.number else self.title


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One act as seen from outside; `reached` maps a milestone to seconds after the fault."""

    act: Act
    node: str
    moved_to: str
    reached: dict[str, float]
    resumed_from: int
    """Step of the checkpoint that the job went on from."""
    steps_lost: int
    """Furthest step applied by a member that lived, less the step resumed from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """All that the report is made from, beside the comparison of the ledgers."""

    incidents: tuple[Incident, ...]
    quarantined_nodes: tuple[str, ...]
    goodput: float
    completed: bool
    seconds: float
    problems: tuple[str, ...] = field(default=())


ACTS = (
    Act(
        number=1,
        title="a GPU fails and still computes: XID 64, row remap failure",
        slot=1,
        gpu_fault="XID 64, row remap failure",
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
