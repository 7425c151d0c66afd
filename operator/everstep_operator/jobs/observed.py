"""What one pass knows about one job: frozen values, made by `observe`, the only input of `plan`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from everstep_contract.levels import Left, Seen
from everstep_contract.report import FOUND_ALONE, Cause, ExitReport
from everstep_contract.units import ONE_RANK, Mesh
from everstep_operator.jobs.slots import GIVEN_UP, Slots, choose_slots, list_units, order_members
from everstep_operator.model import MOST_SLOTS, JobSpec
from everstep_operator.model_status import JobStatus
from everstep_operator.values import NodeState, NodeVerdict

Place = tuple[int, int]
"""(slot, attempt)"""

FRESH_SECONDS = 5.0
"""Older figures do not show what is alive now."""


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
    """A container that its kubelet reports as terminated: proof of its end."""

    exit_code: int
    reason: str
    message: str
    report: ExitReport | None
    """From the termination message, if an agent wrote it."""
    finished_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    name: str
    uid: str
    slot: int
    attempt: int
    phase: str
    reason: str = ""
    """The reason in the pod's status: Evicted, NodeLost, Preempting, …"""
    message: str = ""
    node: str = ""
    ip: str = ""
    created_at: float = 0.0
    deleting_until: float | None = None
    """deletionTimestamp, which is when the grace period ends, on the API server's clock."""
    grace: float = 0.0
    """Seconds of the grace period, if it is being deleted."""
    avoids: frozenset[str] = frozenset()
    """Nodes that its own affinity excludes, from Everstep or the user."""
    scheduling: str = ""
    """The scheduler's message about why no node fits."""
    waiting: str = ""
    """Reason why the container is not running: ImagePullBackOff, CrashLoopBackOff, …"""
    waiting_message: str = ""
    running_since: float | None = None
    ended: Ended | None = None
    """The container has ended and is not running now."""
    last_ended: Ended | None = None
    restarts: int = 0

    @property
    def over(self) -> bool:
        """Nothing in it runs, and the kubelet will start nothing again."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def deleting(self) -> bool:
        return self.deleting_until is not None

    @property
    def refused_by_node(self) -> bool:
        """Its kubelet rejected it, or evicted it before anything ran."""
        ran = self.running_since is not None or self.ended or self.last_ended
        return self.phase == "Failed" and not ran

    @property
    def misconfigured(self) -> bool:
        """Its agent has ended at its start, because it cannot use an address or a variable."""
        found = self.ended.report if self.ended is not None else None
        return self.over and found is not None and found.cause is Cause.CONFIG

    @property
    def failed_alone(self) -> bool:
        """Its script has failed before its ranks were in an epoch: a report of the coordinator names the epoch."""
        found = self.ended.report if self.ended is not None else None
        return self.over and found is not None and found.cause in FOUND_ALONE and not found.epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFact:
    name: str
    not_ready_for: float | None = None
    """Seconds since this operator first saw it not Ready; None: it is Ready."""
    why: str = ""
    rack: str = ""
    """The value of the node's rack label; empty: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A refusal of a pod or Secret by the API server, with its own message."""

    invalid: bool
    """The template is invalid (a retry would fail, too); otherwise not allowed at present: quota,
    policy, RBAC.
    """
    message: str
    generation: int
    at: float
    urgent: bool = False
    """A pod that replaces a lost one, or the Secret, was refused: nothing is created meanwhile. If not
    urgent, pods that replace lost ones are created.
    """
    tries: int = 1
    """How many such refusals followed each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A job that holds nodes without training, or recently gave them back. In `Observed`, one entry
    combines all younger jobs.
    """

    holds: bool
    gave_back_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What the decisions of one pass are based on. A plan looks at every slot, so pods, members and
    leavers are indexed by place: the number of look-ups grows with the number of pods, not with its
    square.
    """

    job: Job
    pods: tuple[Pod, ...] = ()
    seen: Seen | None = None
    """The newest report of the job's agents: highest epoch, then youngest."""
    seen_age: float = 0.0
    """Seconds since it was measured: the operator's clock plus the age in the report."""
    callers: frozenset[str] = frozenset()
    """UIDs of pods whose agent has answered since this operator started."""
    asked_for: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Pod UID → seconds since the operator started to ask it."""
    unproven: frozenset[str] = frozenset()
    """UIDs of pods whose address gives answers without a proof of the job's token."""
    nodes: Mapping[str, NodeFact] = field(default_factory=lambda: MappingProxyType({}))
    absent_nodes: frozenset[str] = frozenset()
    """Nodes that a pod without a node excludes, and that are not in the cluster."""
    cut_off: int = 0
    """How many nodes could run the job's pods, if contact with all of them was lost; else 0."""
    reached_for: float = math.inf
    """Seconds since `cut_off` was last above 0, as observed by this process."""
    silent_nodes: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Node → seconds for which its lease has not been renewed while leases of other nodes were; all
    such nodes of the cluster.
    """
    verdicts: Mapping[str, NodeVerdict] = field(default_factory=lambda: MappingProxyType({}))
    starting_for: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Pod UID → seconds for which a scheduled pod has not been steadily up, as observed by this
    process.
    """
    unplaced_for: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Pod UID → seconds for which it has been unschedulable, as observed by this process."""
    deleting_for: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Pod UID → seconds for which it has been deleted, as observed by this process."""
    leaving_for: Mapping[Place, float] = field(default_factory=lambda: MappingProxyType({}))
    """(slot, attempt) → seconds for which it has been asked to leave, as observed by this process."""
    stopping_for: float = math.inf
    """Seconds for which the job has been asked to stop, as observed by this process."""
    over_for: float = math.inf
    """Seconds for which the job has been over, as observed by this process."""
    suspected_for: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Pod UID → seconds for which its node has been suspect, as observed by this process."""
    steps_for: float = math.inf
    """Seconds for which the job has trained without an evaluation or a pause, as observed by this
    process.
    """
    running_for: float = math.inf
    """Seconds for which the job has trained according to its reports, as observed by this process."""
    short_for: float = math.inf
    """Seconds for which the job has held nodes for some pods, and for fewer than it needs, as observed by
    this process.
    """
    judged: bool = True
    """The nodes have been judged since this process began to act, so a node without a verdict is
    healthy.
    """
    judged_ages: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Node → seconds since the newest exporter page on which its GPUs were judged was sampled; no
    entry: its GPUs are not watched.
    """
    rivals: tuple[Rival, ...] = ()
    lent: frozenset[int] = frozenset()
    """Slots whose spares are given back now, because a pod of another job waits for room."""
    refusal: Refusal | None = None
    spare_refusal: Refusal | None = None
    """The refusal of a spare; it does not keep other pods from being created."""
    template_checked: bool = False
    """The API server has accepted the first pod of this generation in a dry run."""

    @property
    def fresh(self) -> bool:
        return self.seen is not None and self.seen_age <= FRESH_SECONDS

    def lost_for(self, node: NodeFact) -> float | None:
        """Seconds for which the node alone has not been Ready, or together with only some of the nodes
        that could run the job's pods; None: it is Ready.
        """
        away = node.not_ready_for
        return None if away is None else min(away, self.reached_for)

    @property
    def running(self) -> bool:
        """The job reported recently that its epoch's members train."""
        return self.seen is not None and self.seen.running and self.fresh

    def is_member(self, slot: int, attempt: int) -> bool:
        """According to the job's last report, however old: a member stays one while no agent
        answers.
        """
        return (slot, attempt) in self._members

    def has_left(self, slot: int, attempt: int) -> bool:
        return self.left_of(slot, attempt) is not None

    def left_of(self, slot: int, attempt: int) -> Left | None:
        return self._left.get((slot, attempt))

    def pod_of(self, slot: int, attempt: int) -> Pod | None:
        return self._pods.get((slot, attempt))

    def is_past_grace(self, pod: Pod, now: float) -> bool:
        """Whether the grace period of a pod that is being deleted is over. The API server's clock may
        be behind, so this process must have seen it pass, too.
        """
        seen = self.deleting_for.get(pod.uid, 0.0) >= pod.grace
        return seen and pod.deleting_until is not None and pod.deleting_until <= now

    def newest_attempt(self, slot: int) -> int:
        """The highest attempt of the slot that pods or the job's report mention; 0: none."""
        return self._newest_attempts.get(slot, 0)

    @cached_property
    def whole(self) -> bool:
        """Whether, according to the job's last report, its epoch runs and has all its pods. Then
        every other pod is a spare.
        """
        spec = self.job.spec
        seen = self.seen is not None and self.seen.running
        return seen and spec is not None and len(self.slots_inside) >= spec.workers.replicas

    @cached_property
    def slots_inside(self) -> tuple[int, ...]:
        """Slots whose present pod is a member, in the order in which to keep them: units with a
        slot that has to leave come last.
        """
        current = {r.slot: r.attempt for r in self.job.status.slots}
        found = frozenset(s for s, a in self._members if current.get(s, a) == a)
        return order_members(self.units, found, self._leavers, self.together)

    @property
    def together(self) -> int:
        """Number of slots in a unit; 1: each pod holds whole units."""
        spec = self.job.spec
        return 1 if spec is None else self.mesh.count_slots(spec.workers.processes_per_worker)

    @property
    def mesh(self) -> Mesh:
        return ONE_RANK if self.job.spec is None else self.job.spec.parallelism.mesh

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The slots of each unit according to the job's last report, in the order of ranks. Lost
        slots are missing.
        """
        members = self.seen.members if self.seen is not None else ()
        return tuple(list_units(members, self.mesh.unit))

    @cached_property
    def sound_units(self) -> tuple[tuple[int, ...], ...]:
        """The complete units whose slots are all on nodes that are not faulty, suspect or lost."""
        members = self.seen.members if self.seen is not None else ()
        sound = frozenset(m.slot for m in members if self._is_sound(m.slot, m.attempt))
        whole = (unit for unit in self.units if len(unit) == self.together)
        return tuple(unit for unit in whole if sound.issuperset(unit))

    def _is_sound(self, slot: int, attempt: int) -> bool:
        pod = self.pod_of(slot, attempt)
        if pod is None or pod.over or pod.deleting or pod.node in self.silent_nodes:
            return False
        node, verdict = self.nodes.get(pod.node), self.verdicts.get(pod.node)
        ready = node is not None and node.not_ready_for is None
        return ready and (verdict is None or not verdict.avoided)

    @cached_property
    def slots(self) -> Slots:
        """Which slots should have a pod."""
        spec = self.job.spec
        if spec is None:
            return Slots()
        known = {r.slot for r in self.job.status.slots} | {p.slot for p in self.pods}
        return choose_slots(
            known,
            self.slots_inside,
            self._slots_holding,
            self._slots_awaited,
            replicas=spec.workers.replicas,
            spares=self.spares_wanted,
        )

    @cached_property
    def spares_wanted(self) -> int:
        """How many spares the job should have. While there is evidence against a member's node, the
        node may be lost soon, so a job without spares gets one.
        """
        spec = self.job.spec
        if spec is None:
            return 0
        early = 1 if self._may_lose_a_node and spec.workers.replicas < MOST_SLOTS else 0
        return max(0, max(spec.workers.spares, early) - len(self.lent))

    @property
    def _may_lose_a_node(self) -> bool:
        """Whether a member's node may be lost soon. A spare that was created for this stays, also while it
        still starts, until its job has left that node, and until an operator that has just begun to act has
        judged the nodes. A node on which a rank has died is suspect, too, but without evidence, so it does not
        count. Nor does a node beyond the cordon budget: a bad driver convicts many nodes at once, and
        jobs stay on them, so each job would hold one more node for nothing.
        """
        spec = self.job.spec
        doubted = [p for p in self.doubted if not self.verdicts[p.node].over_budget]
        pods = [p for p in self.current_pods if not (p.over or p.deleting)]
        if spec is not None and len(pods) > spec.workers.replicas:
            return bool(doubted) or not self.judged
        inside = [p for p in doubted if p.slot in self.slots_inside]
        return self.running and any(p.node not in self._bad_nodes for p in inside)

    @cached_property
    def doubted(self) -> tuple[Pod, ...]:
        """The present pods on nodes that may be lost soon, or that have to be left."""
        return tuple(p for p in self.current_pods if self._is_doubted(p.node))

    def _is_doubted(self, node: str) -> bool:
        verdict = self.verdicts.get(node)
        suspect = verdict is not None and verdict.state is NodeState.SUSPECT
        return node in self._bad_nodes or bool(suspect and verdict and verdict.evidence)

    @cached_property
    def _bad_nodes(self) -> frozenset[str]:
        bad = (NodeState.LEAVING, NodeState.GONE)
        return frozenset(p.node for p in self.pods if _state_of(self.verdicts, p.node) in bad)

    @cached_property
    def current_pods(self) -> tuple[Pod, ...]:
        """Without pods of former attempts, which are over or left on lost nodes."""
        current = {r.slot: r.attempt for r in self.job.status.slots}
        return tuple(p for p in self.pods if p.attempt >= current.get(p.slot, p.attempt))

    @cached_property
    def recorded_on(self) -> Mapping[str, Sequence[Pod]]:
        """Node → the pods there of the attempts that status records; "": those without a node."""
        found: dict[str, list[Pod]] = {}
        for pod in self._recorded:
            found.setdefault(pod.node, []).append(pod)
        return found

    @cached_property
    def unwanted(self) -> Mapping[int, int]:
        """Slot → attempt of the pods of recorded attempts whose slots are no longer wanted."""
        return {p.slot: p.attempt for p in self._recorded if p.slot not in self.slots.wanted}

    @property
    def _recorded(self) -> Iterator[Pod]:
        recorded = {(r.slot, r.attempt) for r in self.job.status.slots}
        return (p for p in self.pods if (p.slot, p.attempt) in recorded)

    @property
    def node_of_slot(self) -> dict[int, str]:
        """Slot → node of its present pod; empty: the pod has no node yet."""
        return {p.slot: p.node for p in self.current_pods}

    @property
    def _slots_holding(self) -> tuple[int, ...]:
        """Slots that have a pod, in the order in which to keep them."""
        last = {*self._leavers, *self.lent}
        last |= {p.slot for p in self.current_pods if p.node in self._bad_nodes}
        found = {p.slot for p in self.current_pods}
        return tuple(sorted(found, key=lambda s: (s in last, s not in self._slots_up, s)))

    @property
    def _slots_awaited(self) -> tuple[int, ...]:
        """Slots that have lost their pod and have no next one yet: first those that an incident moves."""
        absent = (r for r in self.job.status.slots if self.pod_of(r.slot, r.attempt) is None)
        lost = [r for r in absent if r.pod_uid or r.cause not in (None, *GIVEN_UP)]
        return tuple(r.slot for r in sorted(lost, key=lambda r: (r.incident is None, r.slot)))

    @cached_property
    def _slots_up(self) -> frozenset[int]:
        up = (p for p in self.current_pods if p.running_since and not (p.over or p.deleting))
        return frozenset(p.slot for p in up)

    @cached_property
    def _leavers(self) -> frozenset[int]:
        """Slots that are asked to leave, will be because their pod is being deleted, or have left."""
        asked = {r.slot for r in self.job.status.slots if r.leaving_since is not None}
        asked |= {p.slot for p in self.current_pods if p.deleting}
        return frozenset(asked | {slot for slot, _ in self._left})

    @cached_property
    def _pods(self) -> dict[Place, Pod]:
        return {(p.slot, p.attempt): p for p in reversed(self.pods)}

    @cached_property
    def _members(self) -> frozenset[Place]:
        return frozenset((m.slot, m.attempt) for m in (self.seen.members if self.seen else ()))

    @cached_property
    def _left(self) -> dict[Place, Left]:
        return {(x.slot, x.attempt): x for x in reversed(self.seen.left if self.seen else ())}

    @cached_property
    def _newest_attempts(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for slot, attempt in (*self._pods, *self._members, *self._left):
            found[slot] = max(attempt, found.get(slot, 0))
        return found


def _state_of(verdicts: Mapping[str, NodeVerdict], node: str) -> NodeState | None:
    found = verdicts.get(node)
    return found.state if found is not None else None
