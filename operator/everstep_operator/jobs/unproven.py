"""The Event for pods whose address gives answers without a proof of the job's token. Each pod is
reported once. Pure.
"""

from collections.abc import Set

from everstep_operator.jobs.observed import Observed
from everstep_operator.values import EventDraft

NAMED = 5
"""How many pods one Event names; the others are counted."""


def describe_unproven(observed: Observed, told: Set[str]) -> EventDraft | None:
    """`told`: UIDs of the pods already reported."""
    found = [p for p in observed.pods if p.uid in observed.unproven and p.uid not in told]
    if not found:
        return None
    named = ", ".join(f"{p.name} ({p.ip})" for p in found[:NAMED])
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    message = (
        f"{named}{more}: what answers at this address does not prove that it knows the job's token. Everstep ignores "
        "ends, failures and leaves that it reports. Causes: the image has an older Everstep than the operator (use the "
        "operator's version); the operator's key was changed after the job began (create the job again); another "
        "workload has the address (find it)"
    )
    return EventDraft(reason="AnswerNotProven", message=message, warning=True)
