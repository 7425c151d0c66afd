"""Findings, nodes and quarantines → what to do about nodes. Pure, as a ladder.

1. Without a good list of quarantines nothing is done.
2. *Count first*: what raises the number of quarantined nodes (a NodeQuarantine with `cordon`, new
   or admitted now) stands alone in a plan; a later pass that reads it back touches the node.
3. Releases, marks, specs, statuses and expected GPUs, each on its own object, so that every prefix
   of a plan is legal.

We only undo our own marks, repair them where others removed them, and leave those of others alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

from everstep_operator.evidence import (
    Finding,
    build_incident,
    build_message,
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
from everstep_operator.fleet.release import FleetMemory
from everstep_operator.fleet.statuses import build_status
from everstep_operator.fleet.view import Observed, Policy, View
from everstep_operator.nodes import NodeFacts
from everstep_operator.quarantines import EVIDENCE_LIMIT, Quarantine, build_name
from everstep_operator.values import NodeState

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
    """Look again after so many seconds even if nothing happens."""


def plan(observed: Observed, memory: FleetMemory, policy: Policy, now: float) -> Plan:
    if observed.quarantines is None:
        return build_unreadable(observed, memory, policy)
    view = build_view(observed, memory, policy, now)
    wake_after = policy.settle_seconds if view.losses.waiting else None
    counted = tuple(_plan_counting(view))
    if counted:
        return Plan(actions=counted, memory=view.losses.memory, wake_after=wake_after)
    actions = tuple(_plan_deeds(view))
    memory = _with_repairs(view.losses.memory, actions, now)
    return Plan(actions=actions, memory=memory, wake_after=wake_after)


def build_view(observed: Observed, memory: FleetMemory, policy: Policy, now: float) -> View:
    losses = release.decide_losses(
        observed.nodes,
        observed.quarantines or (),
        memory,
        creatable=observed.creatable,
        many=policy.many_lost,
        settle_seconds=policy.settle_seconds,
        now=now,
    )
    return View(observed=observed, policy=policy, losses=losses, now=now)


def build_unreadable(observed: Observed, memory: FleetMemory, policy: Policy) -> Plan:
    tell = Tell(node="", reason=REASON_UNREADABLE, message=_unreadable(observed))
    return Plan(actions=(tell,), memory=memory, wake_after=policy.settle_seconds * 5)


def _plan_counting(view: View) -> Iterator[Action]:
    yield from _plan_restores(view)
    room = view.room
    standing = view.standing
    for finding in by_urgency(view):
        node = view.observed.nodes[finding.node]
        held = standing.get(node.name)
        if held is None and not view.is_waiting(node):
            yield _create(node, finding, room, view)
            room -= 1
        elif held is not None and not held.cordon and room > 0:
            yield PatchSpec(
                quarantine=replace(held, cordon=True),
                reason=REASON_ADMITTED,
                message=f"{held.message}; the cordon budget has room for it now",
            )
            room -= 1


def _plan_restores(view: View) -> Iterator[Action]:
    many = view.losses.many
    if many:
        message = (
            f"{many} NodeQuarantines are missing at once: nothing is released. They are put back "
            "from the nodes' annotations; to release nodes, delete a few at a time"
        )
        if view.losses.restore:
            yield Tell(node="", reason=release.REASON_MANY, message=message)
    for quarantine in view.losses.restore:
        message = (
            f"node {quarantine.node} bears our mark, but NodeQuarantine {quarantine.name} was missing "
            "and its deletion not observed: put back. Delete it again to release the node"
        )
        yield CreateQuarantine(
            quarantine=quarantine, reason=release.REASON_RESTORED, message=message
        )


def by_urgency(view: View) -> list[Finding]:
    """Convicted nodes: what is gone first, then the oldest."""
    convicted = [
        finding
        for finding in view.observed.findings.values()
        if finding.convicting and finding.node in view.observed.nodes
    ]
    return sorted(
        convicted,
        key=lambda f: (
            choose_state(f.convicting) is not NodeState.GONE,
            f.convicting[0].evidence.first_seen,
            f.node,
        ),
    )


def _create(node: NodeFacts, finding: Finding, room: int, view: View) -> Action:
    claims = finding.convicting
    incident = build_incident(claim.evidence for claim in claims)
    quarantine = Quarantine(
        name=build_name(node.name, incident),
        node=node.name,
        machine=node.machine,
        incident=incident,
        verdict=choose_state(claims),
        reason=choose_reason(claims),
        message=build_message(node.name, claims),
        cordon=room > 0,
        decided_at=round(view.now, 3),
        evidence=tuple(claim.evidence for claim in claims),
    )
    if room > 0:
        return CreateQuarantine(
            quarantine=quarantine, reason=quarantine.reason, message=quarantine.message
        )
    message = (
        f"{quarantine.message}; not cordoned: the cordon budget is spent. Jobs leave the node all "
        "the same. Delete another NodeQuarantine or raise the operator's --cordon-budget"
    )
    return CreateQuarantine(quarantine=quarantine, reason=REASON_OVER_BUDGET, message=message)


def _plan_deeds(view: View) -> Iterator[Action]:
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
    yield from tell_silences(view)


def tell_silences(view: View) -> Iterator[Tell]:
    """What we cannot see is reported on the node, and no reason to act."""
    for name, finding in view.observed.findings.items():
        if finding.silent:
            message = f"node {name}: {finding.silent}; nothing is done about it"
            yield Tell(node=name, reason=finding.silent_reason, message=message)


def plan_releases(view: View) -> Iterator[PatchNode]:
    memory = view.losses.memory
    for name in view.losses.release:
        for node in release.choose_nodes(name, view.observed.nodes, memory):
            finding = view.finding(node.name)
            answered = release.choose_answered(name, memory, node.mark, finding)
            yield PatchNode(
                node=node,
                body=marks.build_release(node, name, answered, finding.present),
                reason=release.REASON_RELEASED,
                message=(
                    f"node {node.name}: NodeQuarantine {name} was deleted; what it held against "
                    "the node counts as answered"
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
    return last is None or view.now - last >= view.policy.repair_seconds


def _marking_message(quarantine: Quarantine, *, repaired: bool) -> str:
    how = f"to release it: kubectl delete nodequarantine {quarantine.name}"
    if repaired:
        return f"node {quarantine.node} lost its cordon or taint and got it back; {how}"
    return f"{quarantine.message}; cordoned and tainted; {how}"


def _plan_specs(view: View) -> Iterator[Action]:
    """New kinds of evidence, and a verdict that got worse."""
    for held in view.standing.values():
        claims = view.finding(held.node).convicting
        keys = {one.key for one in held.evidence}
        fresh = [claim for claim in claims if claim.evidence.key not in keys]
        if not fresh:
            continue
        worse = held.verdict is NodeState.LEAVING and choose_state(claims) is NodeState.GONE
        changed = replace(
            held,
            evidence=(*held.evidence, *(claim.evidence for claim in fresh)),
            verdict=NodeState.GONE if worse else held.verdict,
            reason=choose_reason(claims) if worse else held.reason,
            message=build_message(held.node, claims) if worse else held.message,
        )
        if worse or len(held.evidence) < EVIDENCE_LIMIT:
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
        status = build_status(quarantine, view.observed.nodes.get(quarantine.node))
        held = quarantine.status or {}
        if any(held.get(key) != value for key, value in status.items()):
            yield PatchStatus(quarantine=quarantine, status=status)


def _plan_expectations(view: View) -> Iterator[PatchNode]:
    for finding in view.observed.findings.values():
        node = view.observed.nodes.get(finding.node)
        if node is None or not finding.present - set(node.expected):
            continue
        body = marks.build_expectation(node, finding.present | set(node.expected))
        yield PatchNode(node=node, body=body)


def _with_repairs(memory: FleetMemory, actions: tuple[Action, ...], now: float) -> FleetMemory:
    repaired = {
        action.node.name: now
        for action in actions
        if isinstance(action, PatchNode) and action.reason == REASON_REPAIRED
    }
    merged = MappingProxyType({**memory.repaired_at, **repaired})
    return replace(memory, repaired_at=merged) if repaired else memory


def _unreadable(observed: Observed) -> str:
    return (
        f"NodeQuarantines cannot be listed ({observed.unreadable}): no node is cordoned or "
        "released. Verdicts still reach the jobs. Are the CRDs of crds/ applied?"
    )
