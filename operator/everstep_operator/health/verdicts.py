"""Findings and existing quarantines → one verdict per node concerned."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from everstep_operator.evidence import (
    Claim,
    Finding,
    build_incident,
    build_message,
    choose_gone_pods,
    choose_reason,
    choose_state,
)
from everstep_operator.fleet.memory import FleetMemory
from everstep_operator.fleet.observed import Findings
from everstep_operator.health.decide import REASON_DEATH
from everstep_operator.health.starts import REASON_STARTS
from everstep_operator.nodes import NodeFacts
from everstep_operator.quarantines import Quarantine, choose_standing, conclude, from_mark
from everstep_operator.roster import Roster, list_marks
from everstep_operator.values import NodeState, NodeVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Input besides the newest pages."""

    quarantines: tuple[Quarantine, ...] = ()
    admitted: frozenset[str] = frozenset()
    """Nodes that the cordon budget admits although no quarantine with `cordon` exists for them
    (yet).
    """
    weighed: frozenset[str] = frozenset()
    """Convicted nodes that a fleet pass has weighed against the budget. A rank's death is published at once,
    so the newest pages may convict a node before that.
    """
    decided_at: Mapping[str, float] = field(default_factory=dict)
    """Incident → when its verdict was made; a verdict made now is not in it."""
    start_failures: Mapping[str, int] = field(default_factory=dict)
    """Node → slots whose pods recently failed to start there."""


def build_held(memory: FleetMemory) -> Held:
    """An absent quarantine stays in force until its release or recreation is decided."""
    return Held(
        quarantines=tuple(memory.alive.values()),
        admitted=memory.admitted,
        weighed=memory.weighed,
    )


def choose_verdicts(
    roster: Roster, findings: Findings, held: Held, now: float
) -> dict[str, NodeVerdict]:
    """A mark on a node stands in for its quarantine while that is lost or cannot be read."""
    marked = {node.name: from_mark(node, mark) for node, mark in list_marks(roster)}
    standing = marked | choose_standing(roster.nodes, held.quarantines)
    verdicts = {}
    failed = {node for node in held.start_failures if node in roster.nodes}
    for node in sorted({*findings.telling, *standing, *failed}):
        facts, finding = roster.nodes.get(node), findings.of(node)
        verdict = _choose_verdict(facts, finding, standing.get(node), held, now)
        if verdict is not None:
            verdicts[node] = verdict
    return verdicts


def _choose_verdict(
    facts: NodeFacts | None,
    finding: Finding,
    quarantine: Quarantine | None,
    held: Held,
    now: float,
) -> NodeVerdict | None:
    """Conviction precedes suspicion, which precedes silence. The cordon budget also limits what
    jobs do: beyond it a verdict is only a suspicion, and so is one that no fleet pass has weighed yet.
    """
    admitted = finding.node in held.admitted
    if quarantine is not None:
        verdict = _of_quarantine(facts, finding, quarantine)
        return verdict if quarantine.cordon or admitted else _beyond_budget(verdict)
    if finding.convicting and finding.node in held.admitted | held.weighed:
        verdict = _of_claims(finding, held.decided_at, now)
        return verdict if admitted else _beyond_budget(verdict)
    if finding.claims:
        return _of_suspicion(finding, finding.claims)
    if finding.doubt:
        return _plain(finding.node, NodeState.SUSPECT, REASON_DEATH, finding.doubt)
    if slots := held.start_failures.get(finding.node):
        text = f"pods of {slots} slots recently failed to start here; new pods prefer other nodes"
        return _plain(finding.node, NodeState.SUSPECT, REASON_STARTS, text)
    if finding.silent:
        return _plain(finding.node, NodeState.UNKNOWN, finding.silent_reason, finding.silent)
    return None


def _beyond_budget(verdict: NodeVerdict) -> NodeVerdict:
    text = "the cordon budget is spent, so jobs stay on the node and new pods prefer others"
    return replace(
        verdict,
        state=NodeState.SUSPECT,
        over_budget=True,
        message=f"{verdict.message}; {text}",
    )


def _of_quarantine(
    facts: NodeFacts | None, finding: Finding, quarantine: Quarantine
) -> NodeVerdict:
    """The object keeps what the exporter may have forgotten; newer pages can only make the verdict
    worse.
    """
    state, gone_pods = conclude(quarantine, finding)
    marks = {"signal": quarantine.signal_at, "verdict": quarantine.decided_at}
    if facts is not None and facts.mark is not None and facts.mark.quarantine == quarantine.name:
        marks["cordon"] = facts.mark.at
    return NodeVerdict(
        node=quarantine.node,
        state=state,
        reason=quarantine.reason,
        message=quarantine.message,
        incident=quarantine.incident,
        quarantined=quarantine.cordon,
        marks=MappingProxyType(marks),
        evidence=tuple(one.identity for one in quarantine.evidence),
        gone_pods=gone_pods,
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
        gone_pods=choose_gone_pods(claims, finding.holders),
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
