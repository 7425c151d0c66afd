"""What is written on a node: merge patches, built from the version that was read.

A patch carries the resourceVersion, because the complete list of taints is replaced: if the node
changed in the meantime, the API server rejects the patch and the next pass tries again. Taints and
annotations of others are kept.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from everstep_contract import names
from everstep_operator.evidence import MISSING, Evidence, merge_evidence, still_applies
from everstep_operator.nodes import Answered, ExpectedGpus, Mark, NodeFacts, write
from everstep_operator.quarantines import Quarantine, limited

ANSWERED_LIMIT = 128
EXPECTED_LIMIT = 64


def build_mark(node: NodeFacts, quarantine: Quarantine, now: float) -> Mark:
    held = node.mark
    return Mark(
        quarantine=quarantine.name,
        incident=quarantine.incident,
        cordoned=_is_ours(node, quarantine),
        at=held.at if held and held.quarantine == quarantine.name else round(now, 3),
        verdict=quarantine.verdict.value,
        reason=quarantine.reason,
        message=quarantine.message,
        decided_at=quarantine.decided_at,
        evidence=limited(quarantine.evidence),
        gone_pods=quarantine.gone_pods,
        machine=node.machine,
    )


def _is_ours(node: NodeFacts, quarantine: Quarantine) -> bool:
    """A node that another actor had cordoned before stays cordoned on release."""
    if not node.unschedulable:
        return True
    if node.mark is not None:
        return node.mark.cordoned
    return bool((quarantine.status or {}).get("cordoned", False))


def is_marked(node: NodeFacts, quarantine: Quarantine) -> bool:
    """Whether annotation, taint and cordon are present and match this quarantine as it is now."""
    mark = node.mark
    return (
        node.unschedulable
        and node.tainted
        and mark is not None
        and mark.quarantine == quarantine.name
        and mark.verdict == quarantine.verdict.value
        and mark.evidence == limited(quarantine.evidence)
        and mark.gone_pods == quarantine.gone_pods
    )


def build_marking(node: NodeFacts, quarantine: Quarantine, now: float) -> dict[str, Any]:
    """Cordon, taint and annotation in one patch, which is atomic."""
    taint = {
        "key": names.TAINT_QUARANTINE,
        "value": quarantine.incident,
        "effect": "NoSchedule",
    }
    mark = build_mark(node, quarantine, now)
    return _patch(
        node,
        {names.ANNOTATION_CORDONED: write(mark)},
        {"unschedulable": True, "taints": [*_others(node), taint]},
    )


def build_release(
    node: NodeFacts,
    quarantine_name: str,
    answered: Iterable[Evidence],
    present: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """Removes Everstep's marks of that quarantine and records its evidence as answered."""
    merged = merge_evidence(node.answered, answered)
    annotations: dict[str, Any] = {
        names.ANNOTATION_ANSWERED: _answered_text(node, merged),
        names.ANNOTATION_EXPECTED_GPUS: _expected_text(
            node, _without_missing(node, merged, present)
        ),
    }
    spec: dict[str, Any] = {}
    mark = node.mark or node.stale
    if mark is not None and mark.quarantine == quarantine_name:
        annotations[names.ANNOTATION_CORDONED] = None
        spec["taints"] = _others(node)
        if mark.cordoned:
            spec["unschedulable"] = None
    return _patch(node, annotations, spec)


def build_expectation(node: NodeFacts, uuids: Iterable[str]) -> dict[str, Any]:
    return _patch(node, {names.ANNOTATION_EXPECTED_GPUS: _expected_text(node, uuids)}, {})


def _patch(
    node: NodeFacts, annotations: Mapping[str, Any], spec: Mapping[str, Any]
) -> dict[str, Any]:
    metadata = {"resourceVersion": node.version, "annotations": dict(annotations)}
    return {"metadata": metadata, **({"spec": dict(spec)} if spec else {})}


def _others(node: NodeFacts) -> list[Mapping[str, Any]]:
    return [taint for taint in node.taints if taint.get("key") != names.TAINT_QUARANTINE]


def _without_missing(
    node: NodeFacts, answered: Iterable[Evidence], present: frozenset[str]
) -> list[str]:
    """The GPUs expected after a release: a missing GPU is no longer expected, unless it is back."""
    missing = {one.gpu for one in answered if one.kind == MISSING} - present
    return [uuid for uuid in node.expected if uuid not in missing]


def _answered_text(node: NodeFacts, evidence: Iterable[Evidence]) -> str:
    kept = [e for e in evidence if still_applies(e, machine=node.machine, boot=node.boot)]
    return write(Answered(evidence=tuple(kept[-ANSWERED_LIMIT:])))


def _expected_text(node: NodeFacts, uuids: Iterable[str]) -> str:
    return write(ExpectedGpus(machine=node.machine, uuids=limit_expected(uuids)))


def limit_expected(uuids: Iterable[str]) -> tuple[str, ...]:
    """As many of the GPUs as the annotation may list, always the same ones."""
    return tuple(sorted(uuids))[:EXPECTED_LIMIT]
