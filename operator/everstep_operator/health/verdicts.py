"""Findings and the quarantines that stand → one verdict per node in question."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from everstep_operator.evidence import (
    Claim,
    Finding,
    build_incident,
    build_message,
    choose_reason,
    choose_state,
)
from everstep_operator.health import rules
from everstep_operator.nodes import NodeFacts
from everstep_operator.quarantines import Quarantine, binds
from everstep_operator.values import NodeState, NodeVerdict


def choose_verdicts(
    nodes: Mapping[str, NodeFacts],
    findings: Mapping[str, Finding],
    quarantines: Iterable[Quarantine],
    decided_at: Mapping[str, float],
    now: float,
) -> dict[str, NodeVerdict]:
    """`decided_at`: when the verdict of an incident fell, by incident; one that falls now is not
    in it."""
    held = {q.node: q for q in quarantines if not q.deleting and binds(q, nodes.get(q.node))}
    verdicts = {}
    for node in sorted(set(findings) | set(held)):
        finding = findings.get(node) or Finding(node=node)
        verdict = choose_verdict(nodes.get(node), finding, held.get(node), decided_at, now)
        if verdict is not None:
            verdicts[node] = verdict
    return verdicts


def choose_verdict(
    facts: NodeFacts | None,
    finding: Finding,
    quarantine: Quarantine | None,
    decided_at: Mapping[str, float],
    now: float,
) -> NodeVerdict | None:
    """What convicts outranks what is only suspected, which outranks what we cannot see."""
    if quarantine is not None:
        return _of_quarantine(facts, finding, quarantine)
    if finding.convicting:
        return _of_claims(finding, decided_at, now)
    if finding.claims:
        return _of_suspicion(finding, finding.claims)
    if finding.doubt:
        return _plain(finding.node, NodeState.SUSPECT, rules.REASON_DEATH, finding.doubt)
    if finding.silent:
        return _plain(finding.node, NodeState.UNKNOWN, finding.silent_reason, finding.silent)
    return None


def _of_quarantine(
    facts: NodeFacts | None, finding: Finding, quarantine: Quarantine
) -> NodeVerdict:
    """The object remembers what the exporter may have forgotten; the newest pages can only make it
    worse."""
    gone = (
        quarantine.verdict is NodeState.GONE or choose_state(finding.convicting) is NodeState.GONE
    )
    marks = {"signal": quarantine.signal_at, "verdict": quarantine.decided_at}
    if facts is not None and facts.mark is not None and facts.mark.quarantine == quarantine.name:
        marks["cordon"] = facts.mark.at
    return NodeVerdict(
        node=quarantine.node,
        state=NodeState.GONE if gone else NodeState.LEAVING,
        reason=quarantine.reason,
        message=quarantine.message,
        incident=quarantine.incident,
        quarantined=quarantine.cordon,
        marks=MappingProxyType(marks),
        evidence=tuple(one.identity for one in quarantine.evidence),
        gone_pods=_gone_pods(finding.convicting),
    )


def _of_claims(finding: Finding, decided_at: Mapping[str, float], now: float) -> NodeVerdict:
    claims = finding.convicting
    incident = build_incident(claim.evidence for claim in claims)
    signal = claims[0].evidence.first_seen
    marks = {"signal": signal, "verdict": decided_at.get(incident, round(now, 3))}
    return NodeVerdict(
        node=finding.node,
        state=choose_state(claims),
        reason=choose_reason(claims),
        message=build_message(finding.node, claims),
        incident=incident,
        marks=MappingProxyType(marks),
        evidence=tuple(claim.evidence.identity for claim in claims),
        gone_pods=_gone_pods(claims),
    )


def _of_suspicion(finding: Finding, claims: tuple[Claim, ...]) -> NodeVerdict:
    return NodeVerdict(
        node=finding.node,
        state=NodeState.SUSPECT,
        reason=choose_reason(claims),
        message=build_message(finding.node, claims),
        incident=build_incident(claim.evidence for claim in claims),
        marks=MappingProxyType({"signal": claims[0].evidence.first_seen}),
        evidence=tuple(claim.evidence.identity for claim in claims),
    )


def _plain(node: str, state: NodeState, reason: str, message: str) -> NodeVerdict:
    return NodeVerdict(node=node, state=state, reason=reason, message=f"node {node}: {message}")


def _gone_pods(claims: Iterable[Claim]) -> frozenset[str]:
    """Empty unless the holder of every GPU that is gone is known."""
    gone = [claim for claim in claims if claim.state is NodeState.GONE]
    if not all(claim.pods for claim in gone):
        return frozenset()
    return frozenset(pod for claim in gone for pod in claim.pods)
