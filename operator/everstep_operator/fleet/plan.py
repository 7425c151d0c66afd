"""Findings, nodes and quarantines → actions on nodes. Pure.

1. Without a successful list of quarantines nothing is done.

2. *Count first*: a plan with actions that raise the number of quarantined nodes (a NodeQuarantine
with `cordon`, new or admitted now) contains no others. A later pass reads the objects back, and
only that pass changes the nodes.

3. Releases, marks, specs, statuses and expected GPUs, each on its own object, so that every
prefix of a plan is legal.

Everstep undoes only its own marks, repairs them if others removed them, and leaves those of
others alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

from everstep_operator.evidence import (
    Finding,
    build_incident,
    build_message,
    choose_gone_pods,
    choose_reason,
    choose_state,
)
from everstep_operator.fleet import marks, release
from everstep_operator.fleet.actions import (
    Action,
    CreateQuarantine,
    PatchNode,
    PatchSpec,
    PatchStatus,
    Tell,
)
from everstep_operator.fleet.memory import FleetMemory
from everstep_operator.fleet.observed import Observed, Policy
from everstep_operator.fleet.statuses import build_status, describe_put_back
from everstep_operator.fleet.view import View, admit_unlisted, build_view, note_convicted
from everstep_operator.nodes import NodeFacts, choose_expected
from everstep_operator.quarantines import (
    REASON_RESTORED,
    Quarantine,
    build_name,
    conclude,
    is_full,
)

REASON_QUARANTINED = "NodeQuarantined"
REASON_OVER_BUDGET = "QuarantineBudgetExceeded"
REASON_ADMITTED = "QuarantineAdmitted"
REASON_REPAIRED = "QuarantineMarkRepaired"
REASON_UNREADABLE = "QuarantinesUnreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    actions: tuple[Action, ...]
    memory: FleetMemory
    wake_after: float | None = None
    """Seconds until the next look, even if nothing happens."""


def plan(observed: Observed, memory: FleetMemory, policy: Policy, now: float) -> Plan:
    if observed.quarantines is None:
        return build_unreadable(observed, memory, policy)
    view = build_view(observed, memory, policy, now)
    wake_after = policy.settle_seconds if view.losses.waiting else None
    kept = note_convicted(view.losses.memory, view)
    counted = tuple(a for a in _plan_counting(view) if memory.may_try(a, now))
    if counted:
        return Plan(actions=counted, memory=kept, wake_after=wake_after)
    actions = tuple(a for a in _plan_actions(view) if memory.may_try(a, now))
    memory = _with_repairs(kept, actions, now)
    return Plan(actions=actions, memory=memory, wake_after=wake_after)


def build_unreadable(observed: Observed, memory: FleetMemory, policy: Policy) -> Plan:
    tell = Tell(node="", reason=REASON_UNREADABLE, message=_unreadable(observed))
    kept = admit_unlisted(observed, memory, policy)
    return Plan(actions=(tell,), memory=kept, wake_after=policy.settle_seconds * 5)


def _plan_counting(view: View) -> Iterator[Action]:
    yield from _plan_put_back(view)
    for finding in view.convicted:
        node = view.observed.nodes[finding.node]
        held = view.standing.get(node.name)
        if held is None and not view.is_waiting(node):
            yield _create(node, finding, view)
    for node_name, held in view.standing.items():
        if not held.cordon and node_name in view.admitted:
            yield PatchSpec(
                quarantine=replace(held, cordon=True),
                reason=REASON_ADMITTED,
                message=f"{held.message}; the cordon budget has room for it now: jobs leave the node",
            )


def _plan_put_back(view: View) -> Iterator[Action]:
    lost = view.losses.put_back
    many = sum(quarantine.put_back == release.LOST_MANY for quarantine in lost)
    if many:
        message = (
            f"{many} NodeQuarantines vanished at once without a delete event: no node "
            "is released, and they are recreated. To release the nodes, delete them again"
        )
        yield Tell(node="", reason=release.LOST_MANY, message=message)
    for quarantine in lost:
        message = f"node {quarantine.node}: {describe_put_back(quarantine)}"
        yield CreateQuarantine(quarantine=quarantine, reason=REASON_RESTORED, message=message)


def _create(node: NodeFacts, finding: Finding, view: View) -> Action:
    claims = finding.convicting
    admitted = node.name in view.admitted
    incident = build_incident(claim.evidence for claim in claims)
    quarantine = Quarantine(
        name=build_name(node.name, incident),
        node=node.name,
        machine=node.machine,
        incident=incident,
        verdict=choose_state(claims),
        reason=choose_reason(claims),
        message=build_message(node.name, claims),
        cordon=admitted,
        decided_at=round(view.now, 3),
        evidence=tuple(claim.evidence for claim in claims),
        gone_pods=choose_gone_pods(claims, finding.holders),
    )
    if admitted:
        return CreateQuarantine(
            quarantine=quarantine, reason=quarantine.reason, message=quarantine.message
        )
    message = (
        f"{quarantine.message}; the cordon budget is spent: the node is not cordoned, jobs stay on it, "
        "and new pods prefer other nodes. If many nodes are at fault at once, look for a bad driver or "
        "DCGM roll-out. Otherwise release repaired nodes (kubectl delete nodequarantine) or raise "
        "--cordon-budget (cordonBudget in the chart's values)"
    )
    return CreateQuarantine(quarantine=quarantine, reason=REASON_OVER_BUDGET, message=message)


def _plan_actions(view: View) -> Iterator[Action]:
    touched: set[str] = set()
    for action in (*plan_releases(view), *_plan_marks(view)):
        if action.node.name not in touched:
            touched.add(action.node.name)
            yield action
    yield from _plan_specs(view)
    yield from _plan_statuses(view)
    for action in _plan_expectations(view):
        if action.node.name not in touched:
            yield action
    yield from report_silences(view)


def report_silences(view: View) -> Iterator[Tell]:
    """A silent exporter is reported on the node, and leads to no action."""
    for name in sorted(view.observed.findings.telling):
        finding = view.observed.findings.of(name)
        if finding.silent:
            message = f"node {name}: {finding.silent}; Everstep takes no action"
            yield Tell(node=name, reason=finding.silent_reason, message=message)


def plan_releases(view: View) -> Iterator[PatchNode]:
    yield from _plan_stale(view)
    memory = view.losses.memory
    for name in view.losses.release:
        for node in release.choose_nodes(name, view.observed.roster, memory):
            finding = view.observed.findings.of(node.name)
            answered = release.choose_answered(name, memory, node, finding)
            yield PatchNode(
                node=node,
                body=marks.build_release(node, name, answered, finding.present),
                reason=release.REASON_RELEASED,
                message=(
                    f"node {node.name} is released, because NodeQuarantine {name} was deleted; the same evidence will "
                    "not quarantine it again"
                ),
            )


def _plan_stale(view: View) -> Iterator[PatchNode]:
    """Another machine has taken over the Node object, with the marks of the one before it."""
    for name in sorted(view.observed.roster.stale):
        node = view.observed.nodes[name]
        assert node.stale is not None
        was = node.stale.quarantine
        yield PatchNode(
            node=node,
            body=marks.build_release(node, was, ()),
            reason=release.REASON_RELEASED,
            message=(
                f"node {name} is released, because it is another machine now: NodeQuarantine {was} was written for the "
                "machine that had this name before"
            ),
        )


def _plan_marks(view: View) -> Iterator[PatchNode]:
    for quarantine in view.standing.values():
        node = view.observed.nodes[quarantine.node]
        if not quarantine.cordon or marks.is_marked(node, quarantine):
            continue
        ours = node.mark is not None and node.mark.quarantine == quarantine.name
        broken = ours and not (node.unschedulable and node.tainted)
        if broken and not _may_repair(view, node):
            continue
        yield PatchNode(
            node=node,
            body=marks.build_marking(node, quarantine, view.now),
            reason=REASON_REPAIRED if broken else "" if ours else REASON_QUARANTINED,
            message=_marking_message(quarantine, repaired=broken),
            warning=True,
        )


def _may_repair(view: View, node: NodeFacts) -> bool:
    last = view.losses.memory.repaired_at.get(node.name)
    return last is None or abs(view.now - last) >= view.policy.repair_seconds


def _marking_message(quarantine: Quarantine, *, repaired: bool) -> str:
    how = f"to release it: kubectl delete nodequarantine {quarantine.name}"
    if repaired:
        return f"node {quarantine.node} had lost its cordon or taint and has it again; {how}"
    return f"{quarantine.message}; cordoned and tainted; {how}"


def _plan_specs(view: View) -> Iterator[Action]:
    """New kinds of evidence, and verdicts that got worse."""
    for held in view.standing.values():
        claims = view.observed.findings.of(held.node).convicting
        keys = {one.key for one in held.evidence}
        fresh = [claim for claim in claims if claim.evidence.key not in keys]
        if not fresh:
            continue
        verdict, gone_pods = conclude(held, view.observed.findings.of(held.node))
        worse = verdict is not held.verdict
        changed = replace(
            held,
            evidence=(*held.evidence, *(claim.evidence for claim in fresh)),
            verdict=verdict,
            gone_pods=gone_pods,
            reason=choose_reason(claims) if worse else held.reason,
            message=build_message(held.node, claims) if worse else held.message,
        )
        full = is_full(held.evidence, view.observed.nodes[held.node])
        if worse or gone_pods != held.gone_pods or not full:
            told = changed if worse else None
            yield PatchSpec(
                quarantine=changed,
                reason=told.reason if told else "",
                message=told.message if told else "",
            )


def _plan_statuses(view: View) -> Iterator[Action]:
    for quarantine in view.observed.quarantines or ():
        if quarantine.deleting:
            continue
        status = build_status(quarantine, view.observed.nodes.get(quarantine.node), view.now)
        held = quarantine.status or {}
        if any(held.get(key) != value for key, value in status.items()):
            yield PatchStatus(quarantine=quarantine, status=status)


def _plan_expectations(view: View) -> Iterator[PatchNode]:
    for name in sorted(view.observed.findings.unlisted):
        finding, node = view.observed.findings.of(name), view.observed.nodes.get(name)
        if node is None:
            continue
        expected = marks.limit_expected(choose_expected(node.expected, finding.present))
        if expected != node.expected:
            yield PatchNode(node=node, body=marks.build_expectation(node, expected))


def _with_repairs(memory: FleetMemory, actions: tuple[Action, ...], now: float) -> FleetMemory:
    repaired = {
        action.node.name: now
        for action in actions
        if isinstance(action, PatchNode) and action.reason == REASON_REPAIRED
    }
    merged = MappingProxyType({**memory.repaired_at, **repaired})
    return replace(memory, repaired_at=merged) if repaired else memory


def _unreadable(observed: Observed) -> str:
    text = f"NodeQuarantines cannot be listed ({observed.unreadable}): no node is cordoned or released."
    if observed.known:
        return f"{text} Verdicts still reach the jobs. Are the CRDs of crds/ applied?"
    return (
        f"{text} Until this operator has listed them once, jobs get no verdicts, and no pods are created: a node may "
        "be in quarantine. Give the operator its rights back (helm upgrade), or look at the API server"
    )
