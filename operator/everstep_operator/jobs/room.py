"""Spares that are given back, because a pod of another job has no room to train.

Kubernetes preempts pods only for a pod of higher priority, so between jobs of equal priority the
operator gives a spare back. Invariants: a waiting pod gets one spare at most, and for a limited
time, so a pod that cannot use the room (its selector is wrong) costs little. Only pods of
Everstep's own jobs count, and only as many as their job needs to be complete.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from everstep_operator.affinity import avoided_by
from everstep_operator.jobs import observe
from everstep_operator.jobs.manifests import to_number
from everstep_operator.jobs.observed import Pod
from everstep_operator.world import Key, Object, World, job_of, key_of

WAITING_SECONDS = 5.0
"""How long a pod waits for the scheduler before a spare is given back for it."""
LENT_SECONDS = 60.0
"""How long the spare stays away for a pod that is still not placed."""
READ_SECONDS = 2.0
"""How long all jobs use one list of the waiting pods."""
MOST_NEEDS = 256
"""How many waiting pods are considered at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A pod that waits for room."""

    uid: str
    job: Key
    requests: Mapping[str, float]
    selector: Mapping[str, str]
    avoids: frozenset[str]
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a spare holds."""

    job: Key
    slot: int
    requests: Mapping[str, float]
    node: str
    labels: Mapping[str, str]
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    job: Key
    slot: int
    at: float


def would_fit(need: Need, place: Place) -> bool:
    """Whether the pod may run on the spare's node and requests no more than the spare holds. If it
    requests devices, only these are compared: CPU and memory are then rarely scarce. Taints are not
    compared. A pod of lower priority has to wait.
    """
    if need.priority < place.priority:
        return False
    devices = {k: v for k, v in need.requests.items() if "/" in k and v > 0}
    asked = devices or need.requests
    roomy = all(v <= place.requests.get(k, 0.0) for k, v in asked.items())
    selected = all(place.labels.get(k) == v for k, v in need.selector.items())
    return roomy and selected and place.node not in need.avoids


def choose_grants(
    needs: Iterable[Need], places: Iterable[Place], grants: Mapping[str, Grant], now: float
) -> dict[str, Grant]:
    """UID of a waiting pod → the spare that makes room for it; only new grants."""
    used = {(g.job, g.slot) for g in grants.values() if now - g.at < LENT_SECONDS}
    free = [p for p in places if (p.job, p.slot) not in used]
    found: dict[str, Grant] = {}
    for need in needs:
        fitting = (p for p in free if p.job != need.job and would_fit(need, p))
        place = next(fitting, None)
        if need.uid in grants or place is None:
            continue
        free.remove(place)
        found[need.uid] = Grant(job=place.job, slot=place.slot, at=now)
    return found


@dataclass(slots=True)
class Room:
    """What this process has observed and granted. A new process starts from zero, which costs one
    spare at most. `pods_of` returns a job's own pods.
    """

    world: World
    pods_of: Callable[[Object], tuple[Pod, ...]]
    _since: dict[str, float] = field(default_factory=dict)
    _grants: dict[str, Grant] = field(default_factory=dict)
    _needs: Sequence[Need] = ()
    _read_at: float = -READ_SECONDS

    def find_lent(self, job: Object, pods: Collection[Pod], now: float) -> frozenset[int]:
        """The slots whose spares this job gives back now."""
        slots = _list_spares(job)
        mine = [g for g in self._grants.values() if g.job == key_of(job)]
        if not slots and not mine:
            return frozenset()
        if not 0 <= now - self._read_at < READ_SECONDS:
            self._read(now)
        late = [n for n in self._needs if now - self._since[n.uid] >= WAITING_SECONDS]
        places = self._list_places(job, [p for p in pods if p.slot in slots])
        self._grants |= choose_grants(late, places, self._grants, now)
        return frozenset(
            g.slot
            for g in self._grants.values()
            if g.job == key_of(job) and now - g.at < LENT_SECONDS
        )

    def _read(self, now: float) -> None:
        self._needs, self._read_at = tuple(islice(self._list_needs(), MOST_NEEDS)), now
        waiting = {need.uid for need in self._needs}
        self._since = {uid: self._since.get(uid, now) for uid in waiting}
        self._grants = {uid: g for uid, g in self._grants.items() if uid in waiting}

    def _list_needs(self) -> Iterator[Need]:
        """The waiting pods that jobs need to be complete, the oldest job's first."""
        claimed = {job_of(pod) for pod in self.world.pods.group("unplaced", "")}
        jobs = [self.world.jobs.get(key[1], key[0]) for key in claimed if key is not None]
        for job in sorted((j for j in jobs if j is not None), key=observe.age_of):
            pods = self.pods_of(job)
            waiting = [p for p in pods if not p.node and p.scheduling and not p.deleting]
            for pod in waiting[: _count_lacking(job, pods)]:
                found = self.world.pods.get(pod.name, key_of(job)[0])
                if found is not None:
                    yield _to_need(found, pod, key_of(job))

    def _list_places(self, job: Object, spares: Sequence[Pod]) -> Iterator[Place]:
        for spare in spares:
            found = self.world.pods.get(spare.name, key_of(job)[0])
            node = self.world.nodes.get(spare.node)
            if found is None or not spare.node or spare.deleting:
                continue
            spec = found.get("spec") or {}
            yield Place(
                job=key_of(job),
                slot=spare.slot,
                requests=sum_requests(spec),
                node=spare.node,
                labels=((node or {}).get("metadata") or {}).get("labels") or {},
                priority=spec.get("priority") or 0,
            )


def _list_spares(job: Object) -> frozenset[int]:
    found = ((job.get("status") or {}).get("spares") or {}).get("slots") or ()
    return frozenset(found)


def _count_lacking(job: Object, pods: Iterable[Pod]) -> int:
    """How many pods with a node the job needs to be complete; any other pod that waits is a spare."""
    spec = job.get("spec") or {}
    replicas = int((spec.get("workers") or {}).get("replicas", 1))
    newest = {p.slot: p for p in sorted(pods, key=lambda p: p.attempt)}
    placed = sum(bool(p.node) and not (p.over or p.deleting) for p in newest.values())
    return 0 if spec.get("suspend") else max(0, replicas - placed)


def _to_need(obj: Object, pod: Pod, job: Key) -> Need:
    spec = obj.get("spec") or {}
    return Need(
        uid=pod.uid,
        job=job,
        requests=sum_requests(spec),
        selector=spec.get("nodeSelector") or {},
        avoids=avoided_by(spec),
        priority=spec.get("priority") or 0,
    )


def sum_requests(pod_spec: Mapping[str, Any]) -> dict[str, float]:
    """The sum of all containers' requests. The API server has filled in requests from limits."""
    total: dict[str, float] = {}
    for container in pod_spec.get("containers") or ():
        resources = container.get("resources") or {}
        asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        for name, quantity in asked.items():
            total[name] = total.get(name, 0.0) + to_number(str(quantity))
    return total
