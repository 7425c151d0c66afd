"""A toy API server for nodes and NodeQuarantines: merge patches, versions, a CRD that can vanish.

It has the interface of `everstep_operator.kube.Kube` and records all writes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep_operator import kube
from everstep_operator.evidence import to_rfc3339
from everstep_operator.fleet.model import NodeQuarantineSpec, NodeQuarantineStatus
from everstep_operator.nodes import NodeFacts, to_facts
from everstep_operator.pacing import Lane
from everstep_operator.quarantines import Quarantine, to_quarantine
from everstep_operator.rules import ApiModel
from patches import copied, merge

Objects = list[dict[str, Any]]


def a_node_object(name: str, **changes: Any) -> dict[str, Any]:
    """`changes` may have gpus, machine, boot, unschedulable, taints and annotations."""
    gpus = str(changes.get("gpus", 2))
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "annotations": dict(changes.get("annotations", {})),
        },
        "spec": {
            "unschedulable": changes.get("unschedulable", False),
            "taints": list(changes.get("taints", ())),
        },
        "status": {
            "capacity": {"nvidia.com/gpu": gpus},
            "allocatable": {"nvidia.com/gpu": gpus},
            "nodeInfo": {
                "machineID": changes.get("machine", f"machine-{name}"),
                "bootID": changes.get("boot", "boot-1"),
            },
        },
    }


@dataclass(slots=True)
class ToyCluster:
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    version: int = 0
    crd: str = "served"
    """served, terminating (nothing can be created) or missing."""
    crd_created_at: float | None = 0.0
    """None if the client has no right to read it."""
    clock: Callable[[], float] = lambda: 1.0
    refuses_lists: bool = False
    """Whether the API server answers 503 to lists of NodeQuarantines."""
    refused: set[str] = field(default_factory=set)
    """Names of objects whose changes an admission webhook refuses."""
    webhook_down: bool = False
    """Whether that webhook does not answer at all."""
    overloaded: bool = False
    """Whether the API server answers 503 to these changes."""
    writes: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    pods: list[dict[str, Any]] = field(default_factory=list)
    seconds_left: Callable[[], float] = lambda: math.inf

    def add(self, kind: kube.Kind, obj: Mapping[str, Any]) -> dict[str, Any]:
        return self._store(kind, copied(dict(obj)))

    def add_nodes(self, count: int, **changes: Any) -> None:
        for index in range(count):
            self.add(kube.NODES, a_node_object(f"node-{index}", **changes))

    def change_node(self, name: str, patch: Mapping[str, Any]) -> None:
        """Change the node as somebody other than the operator."""
        self._store(kube.NODES, merge(self.objects["nodes", name], patch))

    def remove(self, kind: kube.Kind, name: str) -> dict[str, Any]:
        return self.objects.pop((kind.plural, name))

    def node(self, name: str) -> dict[str, Any]:
        return self.objects["nodes", name]

    def nodes(self) -> dict[str, NodeFacts]:
        return {facts.name: facts for facts in map(to_facts, self._of("nodes"))}

    def quarantines(self) -> tuple[Quarantine, ...]:
        return tuple(to_quarantine(obj) for obj in self._of("nodequarantines"))

    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.events]

    def shape(self) -> Any:
        """The final state without versions and times."""
        nodes = {
            n.name: (
                n.unschedulable,
                n.tainted,
                n.mark.quarantine if n.mark else None,
                n.mark.cordoned if n.mark else None,
                tuple(sorted(e.identity for e in n.answered)),
                n.expected,
            )
            for n in self.nodes().values()
        }
        quarantines = {
            q.name: (q.node, q.verdict, q.cordon, q.state, tuple(e.identity for e in q.evidence))
            for q in self.quarantines()
        }
        return nodes, quarantines

    async def list(
        self,
        kind: kube.Kind,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
    ) -> tuple[Objects, str]:
        if kind == kube.PODS:
            wanted = [p for p in self.pods if namespace in (None, p["metadata"]["namespace"])]
            return copied(wanted), str(self.version)
        self._need_crd(kind)
        if self.refuses_lists:
            raise kube.Transient(503, "ServiceUnavailable", "etcd leader changed")
        name = fields.removeprefix("metadata.name=")
        found = [o for o in self._of(kind.plural) if not name or o["metadata"]["name"] == name]
        return copied(found), str(self.version)

    async def get(self, kind: kube.Kind, name: str, namespace: str | None = None) -> dict[str, Any]:
        """Read the CustomResourceDefinition; no other kind can be read."""
        if self.crd == "missing":
            raise kube.Gone(404, "NotFound", name)
        if self.crd_created_at is None:
            raise kube.Denied(403, "Forbidden", name)
        metadata: dict[str, Any] = {"creationTimestamp": to_rfc3339(self.crd_created_at)}
        if self.crd == "terminating":
            metadata["deletionTimestamp"] = to_rfc3339(self.clock())
        return {"metadata": metadata}

    async def delete(
        self, kind: kube.Kind, name: str, namespace: str | None = None, *, uid: str
    ) -> None:
        self._need_crd(kind)
        held = self.objects.get((kind.plural, name))
        if held is None:
            raise kube.Gone(404, "NotFound", f"{name} is not there")
        if held["metadata"].get("uid") != uid:
            raise kube.Conflict(409, "Conflict", f"{name} is another")
        self.writes.append(f"delete {name}")
        self.remove(kind, name)

    async def create(
        self,
        kind: kube.Kind,
        body: kube.Object,
        namespace: str | None = None,
        *,
        dry_run: bool = False,
        lane: Lane = Lane.RECOVERY,
    ) -> kube.Object:
        if kind == kube.EVENTS:
            return self._create_event(body)
        self._need_crd(kind, creating=True)
        key = (kind.plural, body["metadata"]["name"])
        if key in self.objects:
            raise kube.AlreadyExists(409, "AlreadyExists", f"{key} exists")
        stored = {name: copied(part) for name, part in body.items() if name != "status"}
        _set_defaults(NodeQuarantineSpec, stored["spec"])
        self._need_permission(key[1])
        if dry_run:
            return stored
        self.writes.append(f"create {key[1]}")
        born = {"uid": f"uid-{self.version}", "creationTimestamp": to_rfc3339(self.clock())}
        stored["metadata"] = {**stored["metadata"], **born}
        return self._store(kind, stored)

    async def patch(
        self,
        kind: kube.Kind,
        name: str,
        body: Any,
        namespace: str | None = None,
        *,
        sub: str | None = None,
        strategic: bool = False,
        lane: Lane = Lane.RECOVERY,
    ) -> kube.Object:
        self._need_crd(kind)
        held = self.objects.get((kind.plural, name))
        if held is None:
            raise kube.Gone(404, "NotFound", f"{name} is not there")
        wanted = (body.get("metadata") or {}).get("resourceVersion")
        if wanted is not None and wanted != held["metadata"]["resourceVersion"]:
            raise kube.Conflict(409, "Conflict", f"{name} has changed")
        self._need_permission(name)
        self.writes.append(f"patch {kind.plural} {name} {sub or ''}".strip())
        part = {"status": body["status"]} if sub == "status" else body
        merged = copied(merge(held, part))
        if kind == kube.QUARANTINES:
            _set_defaults(NodeQuarantineSpec, merged["spec"])
            if "status" in merged:
                _set_defaults(NodeQuarantineStatus, merged["status"])
        return copied(held if merged == held else self._store(kind, merged))

    def _need_permission(self, name: str) -> None:
        if name in self.refused and self.overloaded:
            raise kube.Transient(503, "ServiceUnavailable", "too busy")
        if name in self.refused and self.webhook_down:
            text = 'failed calling webhook "nodes.example.com": no endpoints available'
            raise kube.Transient(500, "InternalError", text)
        if name in self.refused:
            raise kube.Denied(403, "Forbidden", f"a webhook denied the change of {name}")

    def _of(self, plural: str) -> Objects:
        return [obj for (kind, _), obj in sorted(self.objects.items()) if kind == plural]

    def _store(self, kind: kube.Kind, obj: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        obj["metadata"] = {**obj["metadata"], "resourceVersion": str(self.version)}
        self.objects[kind.plural, obj["metadata"]["name"]] = obj
        return obj

    def _create_event(self, body: kube.Object) -> kube.Object:
        if any(event["metadata"]["name"] == body["metadata"]["name"] for event in self.events):
            raise kube.AlreadyExists(409, "AlreadyExists", "said before")
        self.events.append(body)
        return body

    def _need_crd(self, kind: kube.Kind, *, creating: bool = False) -> None:
        if kind != kube.QUARANTINES or self.crd == "served":
            return
        if self.crd == "missing":
            raise kube.Gone(404, "NotFound", "the server could not find the requested resource")
        if creating:
            raise kube.Invalid(405, "MethodNotAllowed", "create not allowed while terminating")


def _set_defaults(model: type[ApiModel], stored: dict[str, Any]) -> None:
    """Set what is left out to the defaults of the CRD. Raises if a field does not fit the model."""
    defaults = model.model_validate(stored).model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    for key, value in defaults.items():
        if value or not isinstance(value, list):  # the CRD has no default for lists
            stored.setdefault(key, value)
