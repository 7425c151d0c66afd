"""The Event for pods whose address gives answers without a proof of the job's token; once per pod.
Pure.
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
        f"answers at the address of {named}{more} do not prove the job's token: Everstep takes no end, failure or "
        "leave from them, and goes by the answers that do and by what the kubelets report. Either these pods run an "
        "Everstep older than the operator (use an image of its version), or the operator's key was changed after the "
        "job began (create the job anew), or another workload has their address (find out which)"
    )
    return EventDraft(reason="AnswerNotProven", message=message, warning=True)
