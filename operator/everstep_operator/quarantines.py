"""A NodeQuarantine object as a value, and the bodies to write."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from everstep_contract import names
from everstep_operator.evidence import (
    Evidence,
    Finding,
    choose_gone_pods,
    from_rfc3339,
    still_applies,
    to_rfc3339,
)
from everstep_operator.nodes import Mark, NodeFacts, rename
from everstep_operator.values import ALL_PODS, GonePods, NodeState

Object = Mapping[str, Any]
REASON_RESTORED = "QuarantineRestored"
EVIDENCE_LIMIT = 16
PODS_LIMIT = 64
"""More than a node has GPUs or MIG slices."""
_VERDICTS = {NodeState.LEAVING: "Leaving", NodeState.GONE: "Gone"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    name: str
    uid: str = ""
    version: str = ""
    deleting: bool = False
    """Deleted, and held by a finalizer: treated as gone."""
    node: str
    machine: str
    incident: str
    verdict: NodeState
    """LEAVING or GONE."""
    reason: str
    message: str
    cordon: bool
    """The budget admitted it, and it counts against the budget."""
    decided_at: float
    evidence: tuple[Evidence, ...]
    gone_pods: GonePods = ALL_PODS
    """With verdict GONE: the pods concerned."""
    put_back: str = ""
    """Why the object had been lost and was recreated; empty if it was not lost."""
    created_at: float = 0.0
    """When the API server stored it; seconds since the Unix epoch."""
    state: str = ""
    status: Object | None = None
    """As in the object that was read."""

    @property
    def signal_at(self) -> float:
        return min((one.first_seen for one in self.evidence), default=self.decided_at)


def conclude(quarantine: Quarantine, finding: Finding) -> tuple[NodeState, GonePods]:
    """The verdict on the node after these pages, and the pods that are gone.

    An earlier conclusion stands, whichever operator process made it: a later process has not seen
    the pages that named the pods. Only the loss of another GPU makes the verdict worse.
    """
    known = {one.key for one in quarantine.evidence}
    fresh = [
        c for c in finding.convicting if c.state is NodeState.GONE and c.evidence.key not in known
    ]
    if not fresh:
        return quarantine.verdict, quarantine.gone_pods
    found = choose_gone_pods(fresh, finding.holders)
    if quarantine.verdict is not NodeState.GONE:
        return NodeState.GONE, found
    return NodeState.GONE, _join(quarantine.gone_pods, found)


def _join(held: GonePods, found: GonePods) -> GonePods:
    """The pods that `held` or `found` includes."""
    if held.holders and found.holders:
        return GonePods(holders=tuple(sorted({*held.holders, *found.holders})))
    spared = _spared_by(held, found) & _spared_by(found, held)
    return GonePods(spared=tuple(sorted(spared)))


def _spared_by(one: GonePods, other: GonePods) -> frozenset[str]:
    """Those of the pods known by name that `one` does not include."""
    names_ = {*one.spared, *other.spared}
    return frozenset(name for name in names_ if not one.includes(name))


def rename_evidence(
    quarantines: Iterable[Quarantine], nodes: Mapping[str, NodeFacts]
) -> tuple[Quarantine, ...]:
    """The quarantines, with each machine under its present name (`nodes.rename`)."""
    return tuple(
        replace(q, evidence=rename(q.evidence, nodes[q.node])) if q.node in nodes else q
        for q in quarantines
    )


def choose_standing(
    nodes: Mapping[str, NodeFacts], quarantines: Iterable[Quarantine]
) -> dict[str, Quarantine]:
    """Node → the quarantine in force: the one that the node's mark names, or else the oldest."""
    best: dict[str, Quarantine] = {}
    for q in sorted(quarantines, key=lambda q: (q.decided_at, q.name)):
        node = nodes.get(q.node)
        if node is None or q.deleting or not binds(q, node):
            continue
        if q.node not in best or (node.mark is not None and node.mark.quarantine == q.name):
            best[q.node] = q
    return best


def from_mark(node: NodeFacts, mark: Mark) -> Quarantine:
    """The quarantine as it was when the node was marked; used if the object is lost."""
    return Quarantine(
        name=mark.quarantine,
        node=node.name,
        machine=node.machine,
        incident=mark.incident,
        verdict=NodeState.GONE if mark.verdict == NodeState.GONE.value else NodeState.LEAVING,
        reason=mark.reason or REASON_RESTORED,
        message=mark.message or f"node {node.name}: read from the node's annotation",
        cordon=True,
        decided_at=mark.decided_at or mark.at,
        evidence=mark.evidence,
        gone_pods=mark.gone_pods,
    )


def binds(quarantine: Quarantine, node: NodeFacts | None) -> bool:
    """Whether the node is still the machine for which the quarantine was written."""
    return node is not None and node.is_machine(quarantine.machine)


class QuarantineError(ValueError):
    """An object cannot be read; the message names the field."""


def to_quarantine(obj: Object) -> Quarantine:
    """Raises `QuarantineError` for an invalid object that a person wrote and the CRD accepted."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    try:
        return Quarantine(
            name=metadata["name"],
            uid=str(metadata.get("uid", "")),
            version=str(metadata.get("resourceVersion", "")),
            deleting=bool(metadata.get("deletionTimestamp")),
            node=spec["nodeName"],
            machine=spec.get("machine", ""),
            incident=spec["incident"],
            verdict=NodeState.GONE if spec["verdict"] == "Gone" else NodeState.LEAVING,
            reason=spec["reason"],
            message=spec["message"],
            cordon=spec.get("cordon", True),
            decided_at=from_rfc3339(spec["decidedAt"]),
            evidence=tuple(_to_evidence(one) for one in spec.get("evidence") or ()),
            gone_pods=GonePods(
                holders=tuple(spec.get("gonePods") or ()),
                spared=tuple(spec.get("sparedPods") or ()),
            ),
            put_back=spec.get("putBack", ""),
            created_at=from_rfc3339(metadata.get("creationTimestamp") or "1970-01-01T00:00:00Z"),
            state=status.get("state", ""),
            status=status,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise QuarantineError(f"NodeQuarantine {metadata['name']}: {error!r}") from None


def build_object(quarantine: Quarantine) -> dict[str, Any]:
    return {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": names.QUARANTINE_KIND,
        "metadata": {
            "name": quarantine.name,
            "labels": {
                "app.kubernetes.io/managed-by": "everstep-operator",
                f"{names.GROUP}/incident": quarantine.incident,
            },
        },
        "spec": build_spec(quarantine),
    }


def build_spec(quarantine: Quarantine) -> dict[str, Any]:
    return {
        "nodeName": quarantine.node,
        "machine": quarantine.machine,
        "incident": quarantine.incident,
        "verdict": _VERDICTS[quarantine.verdict],
        "reason": quarantine.reason,
        "message": quarantine.message[:1024],
        "cordon": quarantine.cordon,
        "gpu": quarantine.evidence[0].gpu[:128] if quarantine.evidence else "",
        "decidedAt": to_rfc3339(quarantine.decided_at),
        "evidence": [_from_evidence(one) for one in limited(quarantine.evidence)],
        "gonePods": list(quarantine.gone_pods.holders[:PODS_LIMIT]),
        "sparedPods": list(quarantine.gone_pods.spared[:PODS_LIMIT]),
        "putBack": quarantine.put_back,
    }


def build_name(node: str, incident: str) -> str:
    """Computed, never generated, so that a repeated create finds its own object."""
    return f"{node[:230].rstrip('.-')}-{incident.removeprefix('inc-')}"


def limited(evidence: Sequence[Evidence]) -> tuple[Evidence, ...]:
    """The newest evidence, as much as the object may hold."""
    return tuple(evidence[-EVIDENCE_LIMIT:])


def is_full(evidence: Iterable[Evidence], node: NodeFacts) -> bool:
    """Whether there may be more evidence against the node than this, because the object holds no
    more. Evidence of an earlier boot takes up no room.
    """
    applies = (still_applies(one, machine=node.machine, boot=node.boot) for one in evidence)
    return sum(applies) >= EVIDENCE_LIMIT


def _to_evidence(obj: Object) -> Evidence:
    return Evidence(
        machine=obj["machine"],
        gpu=obj["gpu"],
        kind=obj["kind"],
        code=int(obj.get("code", 0)),
        first_seen=from_rfc3339(obj["firstSeen"]),
        boot=obj.get("boot", ""),
        appeared=obj.get("appeared", True),
    )


def _from_evidence(evidence: Evidence) -> dict[str, Any]:
    return {
        "machine": evidence.machine,
        "gpu": evidence.gpu,
        "kind": evidence.kind,
        "code": evidence.code,
        "firstSeen": to_rfc3339(evidence.first_seen),
        "boot": evidence.boot,
        "appeared": evidence.appeared,
    }
