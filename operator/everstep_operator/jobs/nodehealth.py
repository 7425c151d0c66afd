"""The condition `NodesHealthy`: nodes that look faulty and on which the job nevertheless stays.
Pure.

The job leaves nodes within the cordon budget, as `Recovering` reports. It stays on nodes beyond the
budget, so only this condition reports them. The condition appears with the first such node; a job
that never had one does not have it.
"""

from everstep_operator.jobs.observed import Observed
from everstep_operator.values import NodeVerdict

TYPE = "NodesHealthy"
REASON_BEYOND = "VerdictsBeyondBudget"
REASON_NONE = "NoVerdictBeyondBudget"
NAMED = 3
"""How many nodes the message names."""


def decide_nodes(observed: Observed) -> tuple[bool, str, str] | None:
    """Status, reason and message; None: there is nothing to report."""
    if not observed.judged:
        return None
    found = _beyond_budget(observed)
    if found:
        return False, REASON_BEYOND, _describe(found)
    told = any(c.type == TYPE and c.status == "False" for c in observed.job.status.conditions)
    return (True, REASON_NONE, "") if told else None


def _beyond_budget(observed: Observed) -> list[NodeVerdict]:
    nodes = {pod.node for pod in observed.pods if not pod.over}
    verdicts = (observed.verdicts.get(node) for node in sorted(nodes))
    return [verdict for verdict in verdicts if verdict is not None and verdict.over_budget]


def _describe(found: list[NodeVerdict]) -> str:
    shown = "; ".join(verdict.message for verdict in found[:NAMED])
    more = f" (and {len(found) - NAMED} more nodes)" if len(found) > NAMED else ""
    return (
        f"{shown}{more}. If many nodes are at fault at once, look for a bad driver or DCGM roll-out. Otherwise release "
        "repaired nodes (kubectl delete nodequarantine) or raise cordonBudget in the chart's values"
    )
