"""The pass of one job: observe → plan → apply, and what this operator remembers between passes.

Everything remembered here may be lost: it only avoids repetition (a completed dry run, a refusal)
or measures how long this process has waited. The state that counts is in the cluster's objects, in
status, and in the job's own report.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from everstep_contract.levels import Seen
from everstep_operator import kube
from everstep_operator.jobs import (
    action_log,
    conditions,
    disruption,
    genuine,
    observe,
    starts,
)
from everstep_operator.jobs.actions import Plan
from everstep_operator.jobs.agents import Agents
from everstep_operator.jobs.apply import Outcome, Pace, apply_plan, create_event, report_failure
from everstep_operator.jobs.clocks import Clocks, measure
from everstep_operator.jobs.deaths import ToldDeaths
from everstep_operator.jobs.observed import Job, NodeFact, Observed, Pod, Refusal, Rival
from everstep_operator.jobs.out_of_memory import ToldOutOfMemory
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.rivals import Rivals
from everstep_operator.jobs.room import Room
from everstep_operator.jobs.statuspatch import choose_figures_seconds
from everstep_operator.jobs.unproven import describe_unproven
from everstep_operator.jobs.unseen import find_unseen
from everstep_operator.kube import Kube
from everstep_operator.values import EventDraft, NodeVerdict
from everstep_operator.world import Key, Object, World, key_of

log = logging.getLogger(__name__)
COUNT_SECONDS = 5.0
"""How long all jobs use one count of the jobs that have figures to write."""


@dataclass(slots=True)
class Memory:
    """What is remembered about one job, until its UID changes."""

    uid: str
    refusal: Refusal | None = None
    spare_refusal: Refusal | None = None
    checked_generation: int | None = None
    deaths: ToldDeaths = field(default_factory=ToldDeaths)
    failed_starts: Mapping[str, int] = field(default_factory=dict)
    """As last passed to `on_failed_starts`."""
    clocks: Clocks = field(default_factory=Clocks)
    untold: tuple[EventDraft, ...] = ()
    """Events to be written after the next plan's actions: those of a counting plan, and those about
    what was observed.
    """
    out_of_memory: ToldOutOfMemory = field(default_factory=ToldOutOfMemory)
    cut_off_at: float = -math.inf
    """When (`Passes.steady`) contact with all nodes that could run its pods was last found lost."""
    unproven: set[str] = field(default_factory=set)
    """UIDs of pods already reported as giving unproven answers."""


@dataclass(slots=True)
class Passes:
    port: Kube
    world: World
    agents: Agents
    key: bytes
    clock: Callable[[], float]
    figures_seconds: float
    figures_qps: float = 10.0
    """Writes of figures per second, all jobs together."""
    on_death: Callable[[str], None] = lambda node: None
    """Called with a node's name when a rank or container has died on it."""
    on_failed_starts: Callable[[Key, Mapping[str, int]], None] = lambda job, nodes: None
    """Called with a job's key and a mapping node → number of slots whose pods failed to start
    there, whenever the mapping has changed.
    """
    on_done: Callable[[str], None] = lambda action: None
    wake: Callable[[Key], None] = lambda key: None
    """Called with the key of a job that is affected by a change of another job."""
    silent_nodes: Callable[[], Mapping[str, float]] = dict
    """Node → seconds for which its lease has not been renewed while leases of other nodes were."""
    verdicts: Mapping[str, NodeVerdict] | None = None
    """None until this process has judged the nodes."""
    judged_at: Mapping[str, float] = field(default_factory=dict)
    """Node → when (`steady`) the newest exporter page on which its GPUs were judged was sampled;
    only nodes whose GPUs are watched.
    """
    steady: Callable[[], float] = time.monotonic
    """Measures how long a state has lasted: when `clock` is set, no limit may seem to be over."""
    awaiting_judgment: set[Key] = field(default_factory=set)
    """Jobs with a worker that died because of its device: each judgment of a node may concern them.
    """
    _memories: dict[Key, Memory] = field(default_factory=dict)
    _not_ready: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Node → the last transition of its Ready condition, and since when (`steady`) it has not been Ready. Only
    existing nodes that are not Ready.
    """
    _with_figures: int = 0
    """How many jobs have figures to write, when they were last counted."""
    _counted_at: float = -COUNT_SECONDS
    _changed_nodes: set[str] = field(init=False)
    _rivals: Rivals = field(init=False)
    _room: Room = field(init=False)

    def __post_init__(self) -> None:
        self._changed_nodes = self.world.nodes.follow()
        self._rivals = Rivals(self.world, self._own_pods, lambda key: self.wake(key))
        self._room = Room(self.world, self._own_pods)

    async def run(self, key: Key) -> float | None:
        """One pass; returns the seconds until the next one. None: only a change causes it."""
        found = self.world.jobs.get(key[1], key[0])
        if found is None:
            self._rivals.refresh()
            self._forget(key)
            return None
        now = self.clock()
        try:
            return await self._pass(found, now)
        except (kube.Transient, kube.Standby, kube.Conflict):
            raise
        except Exception as error:
            await report_failure(self.port, observe.to_job(found), error, now)
            raise

    async def _pass(self, found: Object, now: float) -> float | None:
        observed = self.observe(found)
        self._tell_deaths(observed)
        self._note_events(observed)
        self._tell_failed_starts(observed, now)
        planned = plan(observed, now)
        if planned.counts and await find_unseen(self.port, self.world, observed):
            return 0.0
        keys = genuine.derive_keys(self.key, observed.job.uid)
        self._converse(observed.job, planned, observed.pods, keys.token)
        memory = self._memory(observed.job)
        pace = Pace(figures_seconds=self._figures_pause(), untold=memory.untold)
        outcome = await apply_plan(self.port, observed.job, planned, keys, now, pace)
        memory.untold = outcome.untold
        following = self._remember(observed.job, planned, outcome, now)
        if trouble := outcome.trouble or outcome.undeleted:
            raise trouble
        return following

    def _figures_pause(self) -> float:
        now = self.steady()
        if now - self._counted_at >= COUNT_SECONDS:
            self._counted_at = now
            self._with_figures = sum(map(observe.has_figures, self.world.jobs))
        return choose_figures_seconds(self.figures_seconds, self._with_figures, self.figures_qps)

    def observe(self, found: Object) -> Observed:
        job = observe.to_job(found)
        memory = self._memory(job)
        told = self.agents.report_on(job.key)
        self._note_waiting(job.key, told.seen)
        pods = self._own_pods(found)
        self._rivals.refresh(found, pods)
        steady = self.steady()
        nodes = self._nodes(pods, steady)
        cut_off = self._count_cut_off(job, pods, nodes)
        memory.cut_off_at = steady if cut_off else memory.cut_off_at
        observed = Observed(
            job=job,
            pods=pods,
            seen=told.seen,
            seen_age=told.age,
            callers=told.callers,
            asked_for=told.asked_for,
            unproven=told.unproven,
            nodes=nodes,
            absent_nodes=self._find_absent(pods),
            cut_off=cut_off,
            reached_for=steady - memory.cut_off_at,
            silent_nodes=self.silent_nodes(),
            verdicts=self.verdicts or {},
            judged=self.verdicts is not None,
            judged_ages=self._judged_ages(pods),
            rivals=self._find_rivals(found, pods),
            lent=self._room.find_lent(found, pods, steady),
            refusal=_of_present_spec(memory.refusal, job),
            spare_refusal=_of_present_spec(memory.spare_refusal, job),
            template_checked=memory.checked_generation == job.generation,
        )
        return measure(memory.clocks, observed, steady)

    async def tell_all(self, happening: EventDraft) -> None:
        """Write an Event on each job."""
        now = self.clock()
        for found in list(self.world.jobs):
            await create_event(self.port, observe.to_job(found), happening, now)

    def _memory(self, job: Job) -> Memory:
        held = self._memories.get(job.key)
        if held is None or held.uid != job.uid:
            self._forget(job.key)
            held = self._memories[job.key] = Memory(uid=job.uid)
        return held

    def _note_waiting(self, key: Key, seen: Seen | None) -> None:
        if seen is not None and seen.device_deaths:
            self.awaiting_judgment.add(key)
        else:
            self.awaiting_judgment.discard(key)

    def _forget(self, key: Key) -> None:
        self.awaiting_judgment.discard(key)
        memory = self._memories.pop(key, None)
        if memory is not None and memory.failed_starts:
            self.on_failed_starts(key, {})
        self.agents.forget(key)

    def _nodes(self, pods: tuple[Pod, ...], now: float) -> dict[str, NodeFact]:
        self._note_readiness(now)
        facts = {}
        names_of_nodes = {p.node for p in pods if p.node}
        if not self.world.scope.nodes:
            # Without node watches, a lost node is noticed when Kubernetes deletes its pods.
            return {name: NodeFact(name=name) for name in names_of_nodes}
        for name in names_of_nodes:
            found = self.world.nodes.get(name)
            if found is not None:
                _, since = self._not_ready.get(name, ("", None))
                facts[name] = observe.to_node(found, since, now)
        return facts

    def _find_absent(self, pods: tuple[Pod, ...]) -> frozenset[str]:
        if not self.world.scope.nodes:
            return frozenset()
        named = frozenset[str]().union(*(p.avoids for p in pods if not p.node))
        return frozenset(name for name in named if self.world.nodes.get(name) is None)

    def _count_cut_off(self, job: Job, pods: tuple[Pod, ...], nodes: Mapping[str, NodeFact]) -> int:
        """The nodes of the whole cluster are read only if none of the job's own is Ready."""
        if not nodes or any(node.not_ready_for is None for node in nodes.values()):
            return 0
        found = self.world.pods.get(pods[-1].name, job.namespace) or {}
        return disruption.count_cut_off(self.world.nodes, found.get("spec") or {}, nodes)

    def _note_readiness(self, now: float) -> None:
        """Update since when nodes have not been Ready, for those that have changed since the last
        pass of any job. A node that is Ready, or deleted, is dropped and later starts from zero. So does one that
        was Ready only between two passes: it has another transition.
        """
        for name in self._changed_nodes:
            found = self.world.nodes.get(name)
            if found is None or not observe.describe_not_ready(found):
                self._not_ready.pop(name, None)
                continue
            transition = observe.find_transition(found)
            if name not in self._not_ready or self._not_ready[name][0] != transition:
                self._not_ready[name] = transition, now
        self._changed_nodes.clear()

    def _judged_ages(self, pods: tuple[Pod, ...]) -> dict[str, float]:
        now = self.steady()
        nodes = {p.node for p in pods if p.node in self.judged_at}
        return {node: now - self.judged_at[node] for node in nodes}

    def _find_rivals(self, mine: Object, pods: tuple[Pod, ...]) -> tuple[Rival, ...]:
        """The younger jobs that compete for nodes. Empty for a job that holds no node: it has
        nothing to give back.
        """
        if not observe.is_waiting(mine) or not any(p.node for p in pods):
            return ()
        return self._rivals.find_younger(mine)

    def _own_pods(self, job: Object) -> tuple[Pod, ...]:
        key, uid = key_of(job), job["metadata"]["uid"]
        claimed = self.world.pods_of(key[0], uid)
        if not claimed:
            return ()
        keys = genuine.derive_keys(self.key, uid)
        owner = genuine.build_owner(key, uid, job.get("status") or {}, keys)
        return observe.to_pods(claimed, owner)

    def _tell_deaths(self, observed: Observed) -> None:
        for node in dict.fromkeys(self._memory(observed.job).deaths.take_new(observed)):
            self.on_death(node)

    def _note_events(self, observed: Observed) -> None:
        """Events about what was observed. They are written after the plan's actions, which they must
        not delay.
        """
        memory = self._memory(observed.job)
        found = (
            memory.out_of_memory.take_new(observed),
            describe_unproven(observed, memory.unproven),
        )
        memory.unproven |= observed.unproven
        for happening in filter(None, found):
            action_log.log_event(observed.job, happening)
            memory.untold += (happening,)

    def _tell_failed_starts(self, observed: Observed, now: float) -> None:
        memory, job = self._memory(observed.job), observed.job
        over = any(conditions.is_true(job.status, end) for end in conditions.OVER)
        found = {} if over else starts.count_by_node(job.status.slots, now)
        if found != memory.failed_starts:
            memory.failed_starts = found
            self.on_failed_starts(job.key, found)

    def _converse(self, job: Job, planned: Plan, pods: tuple[Pod, ...], token: str) -> None:
        """Pass the plan's document on to the agents. A counting pass leaves their document
        unchanged: a decision counts only once it is written.
        """
        if planned.counts:
            return
        if planned.wanted is None:
            self.agents.forget(job.key)
            return
        by_place = {(p.slot, p.attempt): p.uid for p in pods}
        addresses = {
            peer.address: uid
            for peer in planned.wanted.peers
            if (uid := by_place.get((peer.slot, peer.attempt)))
        }
        self.agents.tell(job.key, token, planned.wanted, addresses)

    def _remember(self, job: Job, planned: Plan, outcome: Outcome, now: float) -> float | None:
        memory = self._memory(job)
        for name in outcome.done:
            self.on_done(name)
        if outcome.patched is not None:
            self.world.jobs.put(outcome.patched)
        for made in outcome.made:
            self.world.pods.put(made)
        for pod in self.world.pods_of(job.namespace, job.uid):
            if pod["metadata"]["name"] in outcome.gone:
                self.world.pods.drop(pod)
        if outcome.template_checked:
            memory.checked_generation = job.generation
        memory.refusal = _refusal(job, outcome, memory.refusal, now)
        if outcome.spare_refusal is not None:
            memory.spare_refusal = _to_refusal(job, outcome.spare_refusal, now)
        elif "CreatePod" in outcome.done:
            memory.spare_refusal = None
        if planned.counts or outcome.again or outcome.refusal:
            return 0.05 if outcome.patched is not None or outcome.refusal else 0.5
        return planned.wake_after


def _refusal(job: Job, outcome: Outcome, held: Refusal | None, now: float) -> Refusal | None:
    """A pod that replaces a lost one ends no refusal of a pod that replaces none; an edit of the spec
    ends each.
    """
    held = _of_present_spec(held, job)
    if outcome.refusal is not None:
        urgent = outcome.urgent
        tries = held.tries + 1 if held is not None and held.urgent is urgent else 1
        return replace(_to_refusal(job, outcome.refusal, now), urgent=urgent, tries=tries)
    if held is None or outcome.added:
        return None
    return None if held.urgent and "CreatePod" in outcome.done else held


def _of_present_spec(held: Refusal | None, job: Job) -> Refusal | None:
    return held if held is not None and held.generation == job.generation else None


def _to_refusal(job: Job, told: tuple[bool, str], now: float) -> Refusal:
    invalid, message = told
    return Refusal(invalid=invalid, message=message, generation=job.generation, at=now)
