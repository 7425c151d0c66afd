"""The state from the watches, as plain objects: the only input of a pass.

kopf feeds it; a list at start and every few minutes corrects it (an interrupted watch may miss
a deletion). An object is never replaced by an older version of itself, and what was deleted does not
come back with a list that was begun before.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from everstep_contract import names
from everstep_operator.affinity import avoided_by

Object = Mapping[str, Any]
Key = tuple[str, str]
"""(namespace, name); for cluster-scoped objects the namespace is empty."""


def key_of(obj: Object) -> Key:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def version_of(obj: Object) -> int:
    """resourceVersions of one kind are ordered numbers (guaranteed since Kubernetes 1.35, true
    before).
    """
    raw = str(obj["metadata"].get("resourceVersion", "0"))
    return int(raw) if raw.isdigit() else 0


class Mirror:
    """All objects of one kind, grouped in any number of ways. Each way maps an object to the names
    of its groups.
    """

    def __init__(self, **groups_of: Callable[[Object], Collection[str]]) -> None:
        self._objects: dict[Key, Object] = {}
        self._deleted: dict[str, int] = {}
        """UID → version of the deletion, until a list is newer: an older list, or a late answer, may
        still show the object.
        """
        self._ways = groups_of
        self._groups: dict[tuple[str, str], dict[Key, Object]] = {}
        self._followers: list[set[str]] = []
        self._followers_of: dict[str, list[set[str]]] = {}

    def put(self, obj: Object) -> bool:
        """Store the object if it is newer than the stored one and has not been deleted; return whether
        it was.
        """
        key = key_of(obj)
        if version_of(obj) <= self._deleted.get(obj["metadata"].get("uid", ""), -1):
            return False
        held = self._objects.get(key)
        same_life = held is not None and held["metadata"].get("uid") == obj["metadata"].get("uid")
        if held is not None and same_life and version_of(held) >= version_of(obj):
            return False
        self._remove(key)
        kept = _without_bulk(obj)
        self._objects[key] = kept
        for group in self._groups_of(kept):
            self._groups.setdefault(group, {})[key] = kept
            self._note_group(group)
        self._note(key)
        return True

    def drop(self, obj: Object) -> None:
        """The object was deleted; another object with the same name is kept."""
        held, uid = self._objects.get(key_of(obj)), obj["metadata"].get("uid")
        if uid:
            self._deleted[uid] = version_of(obj)
        if held is not None and held["metadata"].get("uid") == uid:
            self._remove(key_of(obj))

    def replace(self, items: Iterable[Object], version: str) -> list[Object]:
        """Correct the mirror with a list of that resourceVersion; return the objects that had
        vanished without an event.
        """
        listed = {key_of(item): item for item in items}
        limit = int(version) if version.isdigit() else 0
        lost = [o for k, o in self._objects.items() if k not in listed and version_of(o) <= limit]
        for obj in lost:
            self._remove(key_of(obj))
        for item in listed.values():
            self.put(item)
        self._deleted = {uid: at for uid, at in self._deleted.items() if at > limit}
        return lost

    def follow(self) -> set[str]:
        """Return a set with the names of all objects, which from now on also receives the name of
        each object that changes or is deleted. The caller empties the set, and can thus update
        derived values without a scan of all objects.
        """
        changed = {name for _, name in self._objects}
        self._followers.append(changed)
        return changed

    def follow_groups(self, by: str) -> set[str]:
        """Like `follow`, for the groups of one way: the names of those whose objects change, come
        or go.
        """
        changed = {name for way, name in self._groups if way == by}
        self._followers_of.setdefault(by, []).append(changed)
        return changed

    def get(self, name: str, namespace: str = "") -> Object | None:
        return self._objects.get((namespace, name))

    def group(self, by: str, name: str) -> tuple[Object, ...]:
        return tuple(self._groups.get((by, name), {}).values())

    def __iter__(self) -> Iterator[Object]:
        return iter(tuple(self._objects.values()))

    def __len__(self) -> int:
        return len(self._objects)

    def _groups_of(self, obj: Object) -> Iterator[tuple[str, str]]:
        for by, groups_of in self._ways.items():
            for name in groups_of(obj):
                yield by, name

    def _remove(self, key: Key) -> None:
        held = self._objects.pop(key, None)
        if held is None:
            return
        for group in self._groups_of(held):
            self._groups[group].pop(key, None)
            if not self._groups[group]:
                del self._groups[group]
            self._note_group(group)
        self._note(key)

    def _note(self, key: Key) -> None:
        for changed in self._followers:
            changed.add(key[1])

    def _note_group(self, group: tuple[str, str]) -> None:
        by, name = group
        for changed in self._followers_of.get(by, ()):
            changed.add(name)


def controller_of(obj: Object) -> Mapping[str, Any] | None:
    """The ownerReference of the object's controller; the API server allows one at most."""
    owners = obj["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


def job_of(pod: Object) -> Key | None:
    """The job that this pod names as its controller: enough to wake that job, but no proof."""
    owner = controller_of(pod)
    if owner is None or owner.get("kind") != names.KIND:
        return None
    return pod["metadata"].get("namespace", ""), str(owner.get("name", ""))


def life_of(job: Object) -> str:
    return _life(job["metadata"].get("namespace", ""), str(job["metadata"].get("uid", "")))


def _life(namespace: str, job_uid: str) -> str:
    """Identifies one job: another job of that name has another UID."""
    return f"{namespace}/{job_uid}"


def _lives_of_job(job: Object) -> tuple[str, ...]:
    return (life_of(job),)


def _lives_of_pod(pod: Object) -> tuple[str, ...]:
    owner = controller_of(pod)
    return (_life(pod["metadata"].get("namespace", ""), str(owner["uid"])),) if owner else ()


def _nodes_of(pod: Object) -> tuple[str, ...]:
    node = (pod.get("spec") or {}).get("nodeName")
    return (str(node),) if node else ()


def _nodes_shut_out(pod: Object) -> Collection[str]:
    """The nodes that a pod excludes while it waits for a node."""
    return () if _nodes_of(pod) else avoided_by(pod.get("spec") or {})


def _unplaced(pod: Object) -> tuple[str, ...]:
    """One group of all pods for which the scheduler has found no node."""
    found = (pod.get("status") or {}).get("conditions") or ()
    waits = any(c.get("type") == "PodScheduled" and c.get("status") == "False" for c in found)
    return ("",) if waits and not _nodes_of(pod) else ()


def _without_bulk(obj: Object) -> Object:
    """Drops managedFields and a node's image list, which are not used."""
    metadata = {k: v for k, v in obj["metadata"].items() if k != "managedFields"}
    status = {k: v for k, v in (obj.get("status") or {}).items() if k != "images"}
    return {**obj, "metadata": metadata, "status": status}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The part of the cluster that this operator manages."""

    namespaces: tuple[str, ...] = ()
    """Namespaces of its jobs and pods; empty: all."""
    nodes: bool = True
    """Whether it also manages nodes and NodeQuarantines."""


class World:
    """Mirrors of jobs, their pods, all nodes and all quarantines; `ready` once each was listed."""

    def __init__(self, scope: Scope | None = None) -> None:
        self.scope = scope or Scope()
        self.jobs = Mirror(job=_lives_of_job)
        self.pods = Mirror(
            job=_lives_of_pod, node=_nodes_of, shut_out=_nodes_shut_out, unplaced=_unplaced
        )
        self.nodes = Mirror()
        self.quarantines = Mirror()
        self.ready = False

    def pods_of(self, namespace: str, job_uid: str) -> tuple[Object, ...]:
        """Pods in that namespace that name this job as their controller. `jobs.genuine` decides
        which of them are the job's own.
        """
        return self.pods.group("job", _life(namespace, job_uid))

    def jobs_on(self, nodes: Iterable[str]) -> set[Key]:
        """Keys of the jobs that have a pod on one of these nodes."""
        return self._jobs_by("node", nodes)

    def jobs_shutting_out(self, nodes: Iterable[str]) -> set[Key]:
        """Keys of the jobs with a pod that has no node yet and excludes one of these nodes."""
        return self._jobs_by("shut_out", nodes)

    def _jobs_by(self, way: str, nodes: Iterable[str]) -> set[Key]:
        keys = (job_of(pod) for node in nodes for pod in self.pods.group(way, node))
        return {key for key in keys if key is not None}
