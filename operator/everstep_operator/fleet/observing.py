"""`--observe-only`: what would have been done is told; nodes and NodeQuarantines are left alone.

Verdicts reach the jobs as ever. Evidence is remembered by nobody but this process: a verdict stands
as long as the exporter shows its reason, and a GPU that vanishes while no operator runs is not
missed. Marks of former, armed days stand until somebody deletes their NodeQuarantine: that alone is
answered with a write, because a node must not be harder to release than it was to take.
"""

from collections.abc import Iterator

from everstep_operator.evidence import Finding, build_message, choose_reason
from everstep_operator.fleet.actions import Tell
from everstep_operator.fleet.plan import (
    Plan,
    build_unreadable,
    build_view,
    by_urgency,
    plan_releases,
    tell_silences,
)
from everstep_operator.fleet.release import FleetMemory
from everstep_operator.fleet.view import Observed, Policy, View

REASON_STANDING = "QuarantineMarkStands"
HOW_TO_ARM = "To arm: observeOnly: false in the chart's values (--observe-only=false)"


def plan_observing(observed: Observed, memory: FleetMemory, policy: Policy, now: float) -> Plan:
    if observed.quarantines is None:
        return build_unreadable(observed, memory, policy)
    view = build_view(observed, memory, policy, now)
    kept = view.losses.memory
    open_ = set(kept.absent_since) & set(kept.alive) - kept.refused
    return Plan(
        actions=(
            *plan_releases(view),
            *_tell_convicted(view),
            *_tell_orphans(view),
            *tell_silences(view),
        ),
        memory=kept,
        wake_after=policy.settle_seconds if open_ else None,
    )


def _tell_convicted(view: View) -> Iterator[Tell]:
    room = view.room
    for finding in by_urgency(view):
        if finding.node in view.standing or view.observed.nodes[finding.node].mark is not None:
            continue
        yield _tell_one(finding, within=room > 0)
        room -= 1


def _tell_one(finding: Finding, *, within: bool) -> Tell:
    would = (
        "it would be cordoned and tainted"
        if within
        else "it would not be cordoned either: the cordon budget would be spent"
    )
    message = build_message(finding.node, finding.convicting)
    return Tell(
        node=finding.node,
        reason=choose_reason(finding.convicting),
        message=f"{message}; observing only: jobs leave the node, {would}. {HOW_TO_ARM}",
    )


def _tell_orphans(view: View) -> Iterator[Tell]:
    """Armed, we would put the object back; so people do by hand what they would do by deleting it."""
    seen = view.losses.memory.alive
    for node in view.observed.nodes.values():
        if node.mark is None or node.mark.quarantine in seen:
            continue
        uncordon = f"kubectl uncordon {node.name}; " if node.mark.cordoned else ""
        message = (
            f"node {node.name} bears our mark, but its NodeQuarantine {node.mark.quarantine} is "
            f"missing and this operator only observes. To release the node: {uncordon}"
            f"kubectl taint node {node.name} everstep.dev/quarantine-; "
            f"kubectl annotate node {node.name} everstep.dev/cordoned-by-. {HOW_TO_ARM}"
        )
        yield Tell(node=node.name, reason=REASON_STANDING, message=message)
