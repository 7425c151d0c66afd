"""What the watches have told us, as plain objects: the only thing that a pass reads from.

kopf feeds it, a list at start and every few minutes corrects it (a watch that was cut may miss a
deletion). An object never gives way to an older copy of itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from everstep_contract import names

Object = Mapping[str, Any]
Key = tuple[str, str]
"""(namespace, name); of cluster-scoped objects the namespace is empty."""


def key_of(obj: Object) -> Key:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def version_of(obj: Object) -> int:
    """resourceVersions of one kind are ordered numbers (promised since Kubernetes 1.35, true before)."""
    raw = str(obj["metadata"].get("resourceVersion", "0"))
    return int(raw) if raw.isdigit() else 0


class Mirror:
    """All objects of one kind. `group_of` sorts them for `group`; "" sorts nowhere."""

    def __init__(self, group_of: Callable[[Object], str] = lambda obj: "") -> None:
        self._objects: dict[Key, Object] = {}
        self._groups: dict[str, dict[Key, Object]] = {}
        self._group_of = group_of

    def put(self, obj: Object) -> bool:
        """Whether this was news."""
        key = key_of(obj)
        held = self._objects.get(key)
        same_life = held is not None and held["metadata"].get("uid") == obj["metadata"].get("uid")
        if held is not None and same_life and version_of(held) >= version_of(obj):
            return False
        self._remove(key)
        kept = _without_bulk(obj)
        self._objects[key] = kept
        if group := self._group_of(kept):
            self._groups.setdefault(group, {})[key] = kept
        return True

    def drop(self, obj: Object) -> None:
        """The object is deleted; another life under the same name stays."""
        held = self._objects.get(key_of(obj))
        if held is not None and held["metadata"].get("uid") == obj["metadata"].get("uid"):
            self._remove(key_of(obj))

    def replace(self, items: Iterable[Object], version: str) -> list[Object]:
        """Correct the mirror by a list of that resourceVersion; returns the objects that had silently gone."""
        listed = {key_of(item): item for item in items}
        limit = int(version) if version.isdigit() else 0
        lost = [o for k, o in self._objects.items() if k not in listed and version_of(o) <= limit]
        for obj in lost:
            self._remove(key_of(obj))
        for item in listed.values():
            self.put(item)
        return lost

    def get(self, name: str, namespace: str = "") -> Object | None:
        return self._objects.get((namespace, name))

    def group(self, name: str) -> tuple[Object, ...]:
        return tuple(self._groups.get(name, {}).values())

    def __iter__(self) -> Iterator[Object]:
        return iter(tuple(self._objects.values()))

    def __len__(self) -> int:
        return len(self._objects)

    def _remove(self, key: Key) -> None:
        held = self._objects.pop(key, None)
        if held is None:
            return
        group = self._group_of(held)
        if group in self._groups:
            self._groups[group].pop(key, None)
            if not self._groups[group]:
                del self._groups[group]


def _job_uid(obj: Object) -> str:
    return str((obj["metadata"].get("labels") or {}).get(names.LABEL_JOB_UID, ""))


def _without_bulk(obj: Object) -> Object:
    """Nobody here reads who set which field, nor the images that a node has cached."""
    metadata = {k: v for k, v in obj["metadata"].items() if k != "managedFields"}
    status = {k: v for k, v in (obj.get("status") or {}).items() if k != "images"}
    return {**obj, "metadata": metadata, "status": status}


class World:
    """Mirrors of jobs, their pods, all nodes, all quarantines; `ready` once each was listed."""

    def __init__(self) -> None:
        self.jobs = Mirror()
        self.pods = Mirror(_job_uid)
        self.nodes = Mirror()
        self.quarantines = Mirror()
        self.ready = False
