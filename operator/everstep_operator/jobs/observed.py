"""What one pass sees of one job: frozen values, made by `observe`, and all that `plan` gets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from everstep_contract.levels import Left, Seen
from everstep_contract.report import ExitReport
from everstep_operator.model import JobSpec
from everstep_operator.model_status import JobStatus
from everstep_operator.values import NodeVerdict

FRESH_SECONDS = 5.0
"""Figures older than this say nothing about what is alive now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    created_at: float
    deleting: bool
    spec: JobSpec | None
    spec_error: str = ""
    raw_template: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    status: JobStatus
    raw_status: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A container that its kubelet reports terminated: proof."""

    exit_code: int
    reason: str
    message: str
    report: ExitReport | None
    """What our agent left in the termination message, if it was our agent."""
    finished_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    name: str
    uid: str
    slot: int
    attempt: int
    phase: str
    reason: str = ""
    """Of the pod's status: Evicted, NodeLost, Preempting, …"""
    message: str = ""
    node: str = ""
    ip: str = ""
    created_at: float = 0.0
    deleting_until: float | None = None
    """deletionTimestamp, which is when the grace period ends."""
    avoids: frozenset[str] = frozenset()
    """Nodes on which it must not be placed, by its own affinity: ours, or the user's."""
    scheduling: str = ""
    """Why the scheduler has found no node, in its own words."""
    waiting: str = ""
    """Reason for which the container is not running: ImagePullBackOff, CrashLoopBackOff, …"""
    waiting_message: str = ""
    running_since: float | None = None
    ended: Ended | None = None
    """The container has ended, and is not running now."""
    last_ended: Ended | None = None
    restarts: int = 0

    @property
    def over(self) -> bool:
        """Nothing of it runs, and the kubelet will start nothing again."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def deleting(self) -> bool:
        return self.deleting_until is not None

    @property
    def refused_by_node(self) -> bool:
        """Its kubelet would not take it, or it was evicted before anything ran."""
        ran = self.running_since is not None or self.ended or self.last_ended
        return self.phase == "Failed" and not ran


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFact:
    name: str
    not_ready_for: float | None = None
    """Seconds since we first saw it not Ready; None: it is Ready."""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The API server would not make a pod or Secret, in its own words."""

    invalid: bool
    """The template is wrong (and would be next time); otherwise not allowed at present: quota, policy, RBAC."""
    message: str
    generation: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another job, younger than this one, that has nodes and does not train, or lately gave them back."""

    holds: bool
    gave_back_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    job: Job
    pods: tuple[Pod, ...] = ()
    seen: Seen | None = None
    """The newest word of the job's agents: highest epoch, then youngest."""
    seen_age: float = 0.0
    """Seconds since it was measured, our clock plus the age that it carried."""
    callers: frozenset[str] = frozenset()
    """UIDs of pods whose agent has answered since this operator started."""
    asked_for: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Pod UID → seconds for which we have been asking it."""
    nodes: Mapping[str, NodeFact] = field(default_factory=lambda: MappingProxyType({}))
    verdicts: Mapping[str, NodeVerdict] = field(default_factory=lambda: MappingProxyType({}))
    judged: bool = True
    """The nodes have been judged since this process acts: what has no verdict has nothing against it."""
    rivals: tuple[Rival, ...] = ()
    refusal: Refusal | None = None
    template_checked: bool = False
    """The API server has accepted the first pod of this generation in a dry run."""

    @property
    def fresh(self) -> bool:
        return self.seen is not None and self.seen_age <= FRESH_SECONDS

    @property
    def running(self) -> bool:
        """The job says, and lately, that its epoch's members step."""
        return self.seen is not None and self.seen.running and self.fresh

    def is_member(self, slot: int, attempt: int) -> bool:
        """By the job's last word, however old: a member is not forgotten because nobody answers."""
        return self.seen is not None and any(
            m.slot == slot and m.attempt == attempt for m in self.seen.members
        )

    def has_left(self, slot: int, attempt: int) -> bool:
        return self.left_of(slot, attempt) is not None

    def left_of(self, slot: int, attempt: int) -> Left | None:
        said = self.seen.left if self.seen is not None else ()
        return next((x for x in said if (x.slot, x.attempt) == (slot, attempt)), None)

    def pod_of(self, slot: int, attempt: int) -> Pod | None:
        return next((p for p in self.pods if p.slot == slot and p.attempt == attempt), None)
