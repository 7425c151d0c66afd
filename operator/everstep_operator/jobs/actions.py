"""What a plan may ask for. `apply` does them in order; after any prefix the next pass finds its
way.
"""

from dataclasses import dataclass, field
from typing import Any

from everstep_contract.levels import Wanted
from everstep_operator.model_status import JobStatus
from everstep_operator.values import Happening


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateSecret:
    name: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTemplate:
    """A dry run of the first pod: what only the API server knows about a template."""

    body: dict[str, Any]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatePod:
    slot: int
    attempt: int
    body: dict[str, Any]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """That very pod. `force` forgets it without waiting for its kubelet."""

    name: str
    uid: str
    reason: str
    message: str
    slot: int | None = None
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteJob:
    reason: str
    message: str


Action = CreateSecret | CheckTemplate | CreatePod | DeletePod | DeleteJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One pass: either counters rise and nothing else happens (`counts`), or actions are done."""

    actions: tuple[Action, ...] = ()
    status: JobStatus
    """The whole status as it should be."""
    counts: bool = False
    """The status raises a counter: it is written, with the object's version, and the pass ends."""
    wanted: Wanted | None = None
    """What the agents shall be told until the next pass; None: nothing, stop asking."""
    events: tuple[Happening, ...] = ()
    wake_after: float | None = None
    """Seconds after which to look again, even if nothing changes."""
    notes: dict[str, str] = field(default_factory=dict)
