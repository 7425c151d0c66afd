"""The actions of a plan. `apply` performs them in order; after any prefix of them the next pass can
continue.
"""

from dataclasses import dataclass, field
from typing import Any

from everstep_contract.levels import Wanted
from everstep_operator.model_status import JobStatus
from everstep_operator.values import EventDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateSecret:
    name: str
    reason: str
    message: str
    made_before: bool = False
    """A pod of the job has been created, so the Secret has been, too, and a refusal stops nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTemplate:
    """A dry run of the first pod: only the API server can find some template errors."""

    body: dict[str, Any]
    reason: str
    message: str
    spare: bool = False
    """As in `CreatePod`."""
    urgent: bool = False
    """As in `CreatePod`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatePod:
    slot: int
    attempt: int
    body: dict[str, Any]
    reason: str
    message: str
    spare: bool = False
    """The pod is a spare: if it is refused, nothing else has to wait."""
    urgent: bool = False
    """It replaces a pod that a fault took: the write may use the tokens reserved for recoveries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """Deletes the pod with this UID. `force` does not wait for its kubelet."""

    name: str
    uid: str
    reason: str
    message: str
    slot: int | None = None
    force: bool = False
    urgent: bool = False
    """As for `CreatePod`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteJob:
    reason: str
    message: str


Action = CreateSecret | CheckTemplate | CreatePod | DeletePod | DeleteJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One pass: either counters rise and nothing else happens (`counts`), or actions are performed."""

    actions: tuple[Action, ...] = ()
    status: JobStatus
    """The complete status as it should be."""
    counts: bool = False
    """The status raises a counter: it is written with the observed resourceVersion, and the pass
    ends.
    """
    wanted: Wanted | None = None
    """The document for the agents until the next pass; None: they are no longer asked."""
    events: tuple[EventDraft, ...] = ()
    wake_after: float | None = None
    """Seconds until the next pass, even if nothing changes; None: only a change causes it."""
    notes: dict[str, str] = field(default_factory=dict)
