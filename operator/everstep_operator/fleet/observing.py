"""`--observe-only`: reports what would have been done and leaves nodes and NodeQuarantines alone.

Jobs still receive verdicts. Evidence is kept in this process only: a verdict stands as long as
the exporter shows its reason, and a GPU that vanishes while no operator runs is not noticed.
Existing quarantines stay in force until their NodeQuarantine is deleted. Only such a release is
written, because a node must not be harder to release than to quarantine.
"""

from collections.abc import Iterator

from everstep_operator.evidence import Finding, build_message, choose_reason
from everstep_operator.fleet.actions import Tell
from everstep_operator.fleet.memory import FleetMemory
from everstep_operator.fleet.observed import Observed, Policy
from everstep_operator.fleet.plan import (
    Plan,
    build_unreadable,
    plan_releases,
    report_silences,
)
from everstep_operator.fleet.view import View, build_view, note_convicted
from everstep_operator.roster import list_marks

REASON_STANDING = "QuarantineMarkStands"
HOW_TO_ARM = "To change that: observeOnly: false in the chart's values (--observe-only=false)"


def plan_observing(observed: Observed, memory: FleetMemory, policy: Policy, now: float) -> Plan:
    if observed.quarantines is None:
        return build_unreadable(observed, memory, policy)
    view = build_view(observed, memory, policy, now)
    kept = note_convicted(view.losses.memory, view)
    open_ = set(kept.absent_since) & set(kept.alive) - kept.lost.keys()
    releases = (release for release in plan_releases(view) if memory.may_try(release, now))
    return Plan(
        actions=(
            *releases,
            *_report_convicted(view),
            *_report_orphans(view),
            *report_silences(view),
        ),
        memory=kept,
        wake_after=policy.settle_seconds if open_ else None,
    )


def _report_convicted(view: View) -> Iterator[Tell]:
    for finding in view.convicted:
        if finding.node in view.standing or view.observed.nodes[finding.node].mark is not None:
            continue
        yield _report_one(finding, within=finding.node in view.admitted)


def _report_one(finding: Finding, *, within: bool) -> Tell:
    follows = (
        "jobs leave the node, but Everstep does not cordon it, because it is in observe-only mode"
        if within
        else "Everstep is in observe-only mode and would not cordon the node either way, because the cordon budget "
        "would be spent: jobs stay on the node, and new pods prefer others"
    )
    message = build_message(finding.node, finding.convicting)
    return Tell(
        node=finding.node,
        reason=choose_reason(finding.convicting),
        message=f"{message}; {follows}. {HOW_TO_ARM}",
    )


def _report_orphans(view: View) -> Iterator[Tell]:
    """Report marks whose NodeQuarantine is missing. With observeOnly=false the object would be
    recreated; here the message says how to release the node by hand.
    """
    seen = view.losses.memory.alive.keys() - view.losses.memory.lost.keys()
    seen |= view.observed.unread.keys()
    for node, mark in list_marks(view.observed.roster):
        if mark.quarantine in seen:
            continue
        uncordon = f"kubectl uncordon {node.name}; " if mark.cordoned else ""
        message = (
            f"node {node.name} has Everstep's mark, but its NodeQuarantine {mark.quarantine} "
            "is missing and this operator is in observe-only mode. To release the node: "
            f"{uncordon}kubectl taint node {node.name} everstep.dev/quarantine-; kubectl "
            f"annotate node {node.name} everstep.dev/cordoned-by-. {HOW_TO_ARM}"
        )
        yield Tell(node=node.name, reason=REASON_STANDING, message=message)
