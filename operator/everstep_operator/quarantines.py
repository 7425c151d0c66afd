"""A NodeQuarantine object as a value, and the bodies that are written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep_contract import names
from everstep_operator.evidence import Evidence, Kind, from_rfc3339, to_rfc3339
from everstep_operator.nodes import NodeFacts
from everstep_operator.values import NodeState

Object = Mapping[str, Any]
EVIDENCE_LIMIT = 16
_VERDICTS = {NodeState.LEAVING: "Leaving", NodeState.GONE: "Gone"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    name: str
    uid: str = ""
    version: str = ""
    deleting: bool = False
    """Deleted, and held back by somebody's finalizer: as good as gone."""
    node: str
    machine: str
    incident: str
    verdict: NodeState
    """LEAVING or GONE."""
    reason: str
    message: str
    cordon: bool
    """The budget admitted it; it counts there."""
    decided_at: float
    evidence: tuple[Evidence, ...]
    state: str = ""
    status: Object | None = None
    """As it stands in the object."""

    @property
    def signal_at(self) -> float:
        return min((one.first_seen for one in self.evidence), default=self.decided_at)


def binds(quarantine: Quarantine, node: NodeFacts | None) -> bool:
    """The machine that it was written for still bears the name."""
    return node is not None and quarantine.machine in ("", node.machine)


class QuarantineError(ValueError):
    """An object that we cannot read; says which field."""


def to_quarantine(obj: Object) -> Quarantine:
    """Raises `QuarantineError`: somebody wrote it by hand in a way that the CRD lets pass."""
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
        "gpu": quarantine.evidence[0].gpu if quarantine.evidence else "",
        "decidedAt": to_rfc3339(quarantine.decided_at),
        "evidence": [_from_evidence(one) for one in limited(quarantine.evidence)],
    }


def build_name(node: str, incident: str) -> str:
    """Computed, never generated: a create that is repeated meets itself."""
    return f"{node[:230].rstrip('.-')}-{incident.removeprefix('inc-')}"


def limited(evidence: Sequence[Evidence]) -> tuple[Evidence, ...]:
    """As many as the object holds."""
    return tuple(evidence[-EVIDENCE_LIMIT:])


def _to_evidence(obj: Object) -> Evidence:
    return Evidence(
        machine=obj["machine"],
        gpu=obj["gpu"],
        kind=Kind(obj["kind"]),
        code=int(obj.get("code", 0)),
        first_seen=from_rfc3339(obj["firstSeen"]),
        boot=obj.get("boot", ""),
        appeared=obj.get("appeared", True),
    )


def _from_evidence(evidence: Evidence) -> dict[str, Any]:
    return {
        "machine": evidence.machine,
        "gpu": evidence.gpu,
        "kind": evidence.kind.value,
        "code": evidence.code,
        "firstSeen": to_rfc3339(evidence.first_seen),
        "boot": evidence.boot,
        "appeared": evidence.appeared,
    }
