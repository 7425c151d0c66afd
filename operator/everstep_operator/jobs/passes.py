"""The pass of one job: observe → plan → apply, and what this operator remembers between passes.

Everything remembered here may be lost: it only spares repetition (a dry run done, a refusal heard)
or measures how long this process has waited. The world, the status and the job's own word are the
memory that counts.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from everstep_contract import auth, names
from everstep_operator import kube
from everstep_operator.jobs import gang, observe
from everstep_operator.jobs.actions import Plan
from everstep_operator.jobs.agents import Agents
from everstep_operator.jobs.apply import Outcome, apply_plan, create_event, say_failed
from everstep_operator.jobs.observed import Job, NodeFact, Observed, Pod, Refusal, Rival
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.statuspatch import choose_figures_seconds
from everstep_operator.kube import Kube
from everstep_operator.values import Happening, NodeVerdict
from everstep_operator.world import Key, Object, World

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Memory:
    """Of one life (UID) of one job."""

    uid: str
    refusal: Refusal | None = None
    checked_generation: int | None = None
    deaths: set[str] | None = None
    """Ends of containers and ranks that have been told to `on_death`; None before the first look."""


@dataclass(slots=True)
class Passes:
    port: Kube
    world: World
    agents: Agents
    key: bytes
    clock: Callable[[], float]
    figures_seconds: float
    figures_qps: float = 10.0
    """Figures of all jobs together, writes a second."""
    on_death: Callable[[str], None] = lambda node: None
    """Called with a node's name when a rank or container has died there."""
    on_done: Callable[[str], None] = lambda action: None
    verdicts: Mapping[str, NodeVerdict] | None = None
    """None until this process has judged the nodes."""
    _memories: dict[Key, Memory] = field(default_factory=dict)
    _not_ready_since: dict[str, float] = field(default_factory=dict)

    async def run(self, key: Key) -> float | None:
        """One pass; returns after how many seconds the next one is due, None: when something changes."""
        found = self.world.jobs.get(key[1], key[0])
        if found is None:
            self._forget(key)
            return None
        now = self.clock()
        try:
            return await self._pass(found, now)
        except (kube.Transient, kube.Standby, kube.Conflict):
            raise
        except Exception as error:
            await say_failed(self.port, observe.to_job(found), error, now)
            raise

    async def _pass(self, found: Object, now: float) -> float | None:
        observed = self.observe(found, now)
        self._tell_deaths(observed)
        planned = plan(observed, now)
        if planned.counts and await self._finds_unseen(observed):
            return 0.0
        token = auth.derive_token(self.key, observed.job.uid)
        self._converse(observed.job, planned, observed.pods, token)
        outcome = await apply_plan(
            self.port, observed.job, planned, token, now, self._figures_pause()
        )
        return self._remember(observed.job, planned, outcome, now)

    async def _finds_unseen(self, observed: Observed) -> bool:
        """Whether a pod that status knows is there after all. A list may be older than the status beside
        it: a pod that nobody has seen vanish is asked for by name before its loss is counted.
        """
        job, found = observed.job, False
        for record in job.status.slots:
            if record.pod_uid is None or observed.pod_of(record.slot, record.attempt) is not None:
                continue
            name = names.pod_name(job.name, record.slot, record.attempt)
            try:
                pod = await self.port.get(kube.PODS, name, job.namespace)
            except kube.Gone:
                continue
            same = pod["metadata"]["uid"] == record.pod_uid
            found |= same and self.world.pods.put(pod)
        return found

    def _figures_pause(self) -> float:
        jobs = len(self.world.jobs)
        return choose_figures_seconds(self.figures_seconds, jobs, self.figures_qps)

    def observe(self, found: Object, now: float) -> Observed:
        job = observe.to_job(found)
        memory = self._memory(job)
        word = self.agents.word_of(job.key)
        pods = observe.to_pods(self.world.pods.group(job.uid), job)
        return Observed(
            job=job,
            pods=pods,
            seen=word.seen,
            seen_age=word.age,
            callers=word.callers,
            asked_for=word.asked_for,
            nodes=self._nodes(pods, now),
            verdicts=self.verdicts or {},
            judged=self.verdicts is not None,
            rivals=self._rivals(found) if any(p.node for p in pods) else (),
            refusal=memory.refusal,
            template_checked=memory.checked_generation == job.generation,
        )

    async def tell_all(self, happening: Happening) -> None:
        """An Event on each job."""
        now = self.clock()
        for found in list(self.world.jobs):
            await create_event(self.port, observe.to_job(found), happening, now)

    def _memory(self, job: Job) -> Memory:
        held = self._memories.get(job.key)
        if held is None or held.uid != job.uid:
            self.agents.forget(job.key)
            held = self._memories[job.key] = Memory(uid=job.uid)
        return held

    def _forget(self, key: Key) -> None:
        self._memories.pop(key, None)
        self.agents.forget(key)

    def _nodes(self, pods: tuple[Pod, ...], now: float) -> dict[str, NodeFact]:
        facts = {}
        for name in {p.node for p in pods if p.node}:
            found = self.world.nodes.get(name)
            if found is None:
                continue
            if observe.describe_not_ready(found):
                self._not_ready_since.setdefault(name, now)
            else:
                self._not_ready_since.pop(name, None)
            facts[name] = observe.to_node(found, self._not_ready_since.get(name), now)
        return facts

    def _rivals(self, mine: Object) -> tuple[Rival, ...]:
        if not observe.is_waiting(mine):
            return ()
        uid = mine["metadata"]["uid"]
        others = [o for o in self.world.jobs if o["metadata"]["uid"] != uid]
        found = ((observe.age_of(o), self._rival(o)) for o in others if observe.is_waiting(o))
        return gang.build_rivals(observe.age_of(mine), found)

    def _rival(self, obj: Object) -> Rival:
        return observe.to_rival(obj, self.world.pods.group(obj["metadata"]["uid"]))

    def _tell_deaths(self, observed: Observed) -> None:
        memory, found = self._memory(observed.job), _deaths(observed)
        if memory.deaths is not None:
            for identity in found.keys() - memory.deaths:
                if found[identity]:
                    self.on_death(found[identity])
        memory.deaths = set(found) | (memory.deaths or set())

    def _converse(self, job: Job, planned: Plan, pods: tuple[Pod, ...], token: str) -> None:
        """A pass that counts leaves what is told as it is: nothing is decided before it is written."""
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
        for pod in self.world.pods.group(job.uid):
            if pod["metadata"]["name"] in outcome.gone:
                self.world.pods.drop(pod)
        if outcome.template_checked:
            memory.checked_generation = job.generation
        memory.refusal = _refusal(job, outcome, memory.refusal, now)
        if planned.counts or outcome.again or outcome.refusal:
            return 0.05 if outcome.patched is not None or outcome.refusal else 0.5
        return planned.wake_after


def _refusal(job: Job, outcome: Outcome, held: Refusal | None, now: float) -> Refusal | None:
    if outcome.refusal is not None:
        invalid, message = outcome.refusal
        return Refusal(invalid=invalid, message=message, generation=job.generation, at=now)
    created = "CreatePod" in outcome.done
    return None if created else held


def _deaths(observed: Observed) -> dict[str, str]:
    """Identity of each end that we know of → node on which it was; "" for an end that was in order."""
    found = {}
    for pod in observed.pods:
        if pod.restarts or pod.ended:
            in_order = pod.deleting or (pod.ended is not None and pod.ended.exit_code == 0)
            identity = f"{pod.uid}/{pod.restarts}/{pod.ended is not None}"
            found[identity] = "" if in_order else pod.node
    nodes = {p.slot: p.node for p in observed.pods}
    for incident in observed.seen.incidents if observed.seen else ():
        if incident.slot is not None and incident.cause.startswith(("Worker", "Agent")):
            found[incident.id] = nodes.get(incident.slot, "")
    return found


def jobs_on(world: World, nodes: set[str]) -> set[Key]:
    """Keys of the jobs that have a pod on one of these nodes."""
    found = set()
    for pod in world.pods:
        if (pod.get("spec") or {}).get("nodeName") in nodes:
            labels = pod["metadata"].get("labels") or {}
            found.add((pod["metadata"]["namespace"], str(labels.get(names.LABEL_JOB, ""))))
    return found
