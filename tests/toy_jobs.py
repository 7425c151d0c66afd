"""A cluster that is simple enough to be stopped anywhere.

It has an API server's rules for objects, a kubelet, and a job that trains. It keeps what matters
for convergence: UIDs, resourceVersions, create-once, UID preconditions, merge patches, graceful
deletion, nodes that die, and a runtime that leaves when asked and regroups when all its peers are
there.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep_contract import levels, names
from everstep_operator import kube
from everstep_operator.jobs.reports import JobReport
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.pacing import Lane
from everstep_operator.world import World
from patches import DoesNotFit, apply_operations, copied, merge

Object = dict[str, Any]
Objects = list[Object]
START = 1_000_000.0


class Cut(BaseException):
    """The operator dies here, because none of its code handles this exception."""


@dataclass
class Cutter:
    """Ends the operator at write number `at`, before its effect or, if `after`, after it.

    In the second case, the answer is lost.
    """

    at: int | None = None
    after: bool = False
    writes: int = 0

    def before(self) -> None:
        self.writes += 1
        if self.at == self.writes and not self.after:
            raise Cut

    def behind(self) -> None:
        if self.at == self.writes and self.after:
            raise Cut


@dataclass(frozen=True, slots=True)
class Deletion:
    """A pod that the operator deleted, and where it ran."""

    slot: int
    attempt: int
    node: str | None


@dataclass
class ToyCluster:
    """Objects by (kind, name). Implements what `apply` and `observe` use of `kube.Kube`."""

    cutter: Cutter = field(default_factory=Cutter)
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    now: float = START
    dead_nodes: set[str] = field(default_factory=set)
    stuck_nodes: set[str] = field(default_factory=set)
    """Nodes whose kubelets never start the pods that are bound to them."""
    refusing_nodes: set[str] = field(default_factory=set)
    """Nodes whose kubelets refuse pods (UnexpectedAdmissionError)."""
    refuses: str = ""
    """If not empty, the reason why no pod is accepted (a quota)."""
    made: list[str] = field(default_factory=list)
    deleted: list[Deletion] = field(default_factory=list)
    """Pods that the operator deleted, in this order."""
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    # --- the methods of the port

    async def create(
        self, kind: kube.Kind, body: Object, namespace: str | None = None, *,
        dry_run: bool = False, lane: Lane = Lane.RECOVERY,
    ) -> Object:  # fmt: skip
        self.cutter.before()
        key = kind.plural, body["metadata"]["name"]
        if key in self.objects:
            raise kube.AlreadyExists(409, "AlreadyExists", f"{key} exists")
        if self.refuses and kind is kube.PODS:
            raise kube.Denied(403, "Forbidden", self.refuses)
        made = body if dry_run else copied(self.put(kind, body))
        self.cutter.behind()
        return made

    def put(self, kind: kube.Kind, body: Object) -> Object:
        obj = copied(body)
        metadata = obj["metadata"]
        metadata.update(uid=f"u{next(self._numbers)}", creationTimestamp=to_stamp(self.now))
        metadata.setdefault("namespace", "team")
        self._touch(obj)
        self.objects[kind.plural, metadata["name"]] = obj
        if kind is kube.PODS:
            assert metadata["name"] not in self.made, f"{metadata['name']} was made twice"
            self.made.append(metadata["name"])
        return obj

    async def get(self, kind: kube.Kind, name: str, namespace: str | None = None) -> Object:
        return copied(self._find(kind, name))

    async def list(
        self, kind: kube.Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> tuple[Objects, str]:
        found = [copied(o) for (plural, _), o in self.objects.items() if plural == kind.plural]
        wanted = fields.removeprefix("metadata.name=")
        return [o for o in found if wanted in ("", o["metadata"]["name"])], str(next(self._numbers))

    async def delete(
        self, kind: kube.Kind, name: str, namespace: str | None = None, *, uid: str,
        grace_seconds: int | None = None, lane: Lane = Lane.RECOVERY,
    ) -> None:  # fmt: skip
        self.cutter.before()
        obj = self._find(kind, name)
        if obj["metadata"]["uid"] != uid:
            raise kube.Conflict(409, "Conflict", "another UID")
        if kind is kube.PODS:
            labels = obj["metadata"]["labels"]
            slot, attempt = int(labels[names.LABEL_SLOT]), int(labels[names.LABEL_ATTEMPT])
            self.deleted.append(Deletion(slot, attempt, obj["spec"].get("nodeName")))
        self.mark_deleted(kind, name, force=grace_seconds == 0)
        self.cutter.behind()

    def mark_deleted(self, kind: kube.Kind, name: str, *, force: bool = False) -> None:
        if force or kind is not kube.PODS:
            del self.objects[kind.plural, name]
            return
        obj = self.objects[kind.plural, name]
        obj["metadata"].setdefault("deletionTimestamp", to_stamp(self.now + 30))
        obj["metadata"].setdefault("deletionGracePeriodSeconds", 30)
        self._touch(obj)

    async def patch(
        self, kind: kube.Kind, name: str, body: Object | Objects, namespace: str | None = None, *,
        sub: str | None = None, lane: Lane = Lane.RECOVERY,
    ) -> Object:  # fmt: skip
        self.cutter.before()
        obj = self._find(kind, name)
        try:
            patched = apply_operations(obj, body) if isinstance(body, list) else merge(obj, body)
        except DoesNotFit as error:
            raise kube.Invalid(422, "Invalid", str(error)) from None
        if patched["metadata"]["resourceVersion"] != obj["metadata"]["resourceVersion"]:
            raise kube.Conflict(409, "Conflict", "changed")
        obj["status"] = patched["status"]
        self._touch(obj)
        self.cutter.behind()
        return copied(obj)

    def _find(self, kind: kube.Kind, name: str) -> Object:
        if (kind.plural, name) not in self.objects:
            raise kube.Gone(404, "NotFound", name)
        return self.objects[kind.plural, name]

    def _touch(self, obj: Object) -> None:
        obj["metadata"]["resourceVersion"] = str(next(self._numbers))

    # --- what the cluster does

    def pods(self) -> Objects:
        return [o for (plural, _), o in self.objects.items() if plural == "pods"]

    def job(self) -> Object:
        return self.objects[names.PLURAL, "lm"]

    def edit_spec(self, change: Mapping[str, Any]) -> None:
        job = self.job()
        job["spec"] = merge(job["spec"], change)
        job["metadata"]["generation"] += 1
        self._touch(job)

    def add_node(self, name: str) -> None:
        status = {"conditions": [{"type": "Ready", "status": "True"}]}
        self.objects["nodes", name] = {"metadata": {"name": name, "uid": name}, "status": status}
        self._touch(self.objects["nodes", name])

    def kill_node(self, name: str) -> None:
        self.dead_nodes.add(name)
        node = self.objects["nodes", name]
        away = {"type": "Ready", "status": "Unknown", "message": "no heartbeat"}
        node["status"] = {"conditions": [{**away, "lastTransitionTime": to_stamp(self.now)}]}
        self._touch(node)

    def revive_node(self, name: str) -> None:
        """The API server reaches the node again, and its pods run."""
        self.dead_nodes.discard(name)
        node = self.objects["nodes", name]
        node["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
        self._touch(node)

    def end_container(self, pod: str, *, reason: str) -> None:
        """The pod's container ends, and its kubelet has not started it again yet."""
        obj = self.objects["pods", pod]
        ended = {"exitCode": 137, "reason": reason, "finishedAt": to_stamp(self.now)}
        obj["status"]["containerStatuses"][0]["state"] = {"terminated": ended}
        self._touch(obj)

    def tick(self) -> None:
        """Let the scheduler and the kubelets work for one second."""
        self.now += 1
        for pod in self.pods():
            node = pod["spec"].get("nodeName")
            if node in self.dead_nodes:
                continue
            if "deletionTimestamp" in pod["metadata"]:
                del self.objects["pods", pod["metadata"]["name"]]
            elif node is None:
                self._bind(pod)
            elif "status" not in pod:
                self._start(pod)

    def _bind(self, pod: Object) -> None:
        taken = {p["spec"].get("nodeName") for p in self.pods()}
        nodes = [n for plural, n in self.objects if plural == "nodes"]
        free = [n for n in nodes if n not in taken | self.dead_nodes | _avoided(pod)]
        if free:
            pod["spec"]["nodeName"] = free[0]
            self._touch(pod)

    def _start(self, pod: Object) -> None:
        if pod["spec"]["nodeName"] in self.stuck_nodes:
            return
        if pod["spec"]["nodeName"] in self.refusing_nodes:
            pod["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError"}
            self._touch(pod)
            return
        address = f"10.0.0.{int(pod['metadata']['uid'][1:]) % 250}"
        running = {"name": "trainer", "state": {"running": {"startedAt": to_stamp(self.now)}}}
        pod["status"] = {"phase": "Running", "podIP": address, "containerStatuses": [running]}
        self._touch(pod)

    def feed(self, world: World) -> None:
        """Update the world, as the watches do."""
        for mirror, plural in (
            (world.jobs, names.PLURAL), (world.pods, "pods"), (world.nodes, "nodes"),
        ):  # fmt: skip
            found = [copied(o) for (p, _), o in self.objects.items() if p == plural]
            mirror.replace(found, str(next(self._numbers)))
        world.ready = True


def _avoided(pod: Object) -> set[str]:
    node = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = node.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or []
    return {f["values"][0] for t in terms for f in t.get("matchFields") or ()}


@dataclass
class ToyJob:
    """The runtime: an epoch of members, which ends with a leave, a stop or a death.

    The next epoch starts once `want_workers` peers are ready; those that trained before come first,
    and the rest are spares.
    """

    cluster: ToyCluster
    wanted: levels.Wanted | None = None
    pods: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    running: bool = False
    members: set[tuple[int, int]] = field(default_factory=set)
    spares: set[tuple[int, int]] = field(default_factory=set)
    left: set[tuple[int, int]] = field(default_factory=set)
    stopped: bool = False
    step: int = 0
    done: bool = False

    # --- the methods of `Agents` that a pass uses

    def tell(self, key: Any, token: str, wanted: levels.Wanted, pods: dict[str, str]) -> None:
        self.wanted, self.pods = wanted, pods

    def forget(self, key: Any) -> None:
        self.wanted, self.pods = None, {}

    def report_on(self, key: Any) -> JobReport:
        if not self.pods:
            return JobReport()
        return JobReport(
            seen=self.seen(), age=0.0, callers=frozenset(self.pods.values()),
            asked_for=dict.fromkeys(self.pods.values(), 0.0),
        )  # fmt: skip

    # --- what it does

    def seen(self) -> levels.Seen:
        members = tuple(
            levels.Member(slot=s, attempt=a, incarnation=1, rank=r, life=1, step=self.step)
            for r, (s, a) in enumerate(sorted(self.members))
        )
        return levels.Seen(
            generation=self.wanted.generation if self.wanted else 0,
            epoch=self.epoch, running=self.running, members=members if self.running else (), step=self.step,
            committed=levels.CheckpointRef(epoch=self.epoch, step=self.step) if self.epoch else None,
            left=tuple(levels.Left(slot=s, attempt=a, epoch=self.epoch, step=self.step) for s, a in sorted(self.left)),
            spares=tuple(levels.SlotAttempt(slot=s, attempt=a) for s, a in sorted(self.spares)),
            stopped=levels.Stopped(epoch=self.epoch, step=self.step) if self.stopped else None,
            done=self.done,
        )  # fmt: skip

    def tick(self) -> None:
        alive = self._alive()
        if self.running and not self.members <= alive:
            self.running = False
        if self.wanted is None:
            return
        if self.wanted.stop is not levels.Stop.NONE:
            self.running, self.stopped = False, self.epoch > 0
            return
        asked = {(s, a) for s, a in alive if s in self.wanted.leave}
        if self.running and asked & self.members:
            self.running = False
        self.left |= asked - (self.members if self.running else set())
        self._regroup(alive)
        self.step += self.running

    def _regroup(self, alive: set[tuple[int, int]]) -> None:
        assert self.wanted is not None
        peers = {(p.slot, p.attempt) for p in self.wanted.peers} & alive
        ready = {
            (s, a) for s, a in peers - self.left if s not in (*self.wanted.leave, *self.wanted.hold)
        }
        want = self.wanted.want_workers
        if not self.running and len(ready) >= want:
            self.epoch, self.running, self.stopped = self.epoch + 1, True, False
            self.members = set(sorted(ready, key=lambda p: (p not in self.members, p))[:want])
        self.spares = ready - self.members if self.running else set()

    def _alive(self) -> set[tuple[int, int]]:
        return {
            (int(p["metadata"]["labels"][names.LABEL_SLOT]), int(p["metadata"]["labels"][names.LABEL_ATTEMPT]))
            for p in self.cluster.pods()
            if "status" in p and p["spec"]["nodeName"] not in self.cluster.dead_nodes
        }  # fmt: skip
