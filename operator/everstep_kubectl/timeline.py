"""A timeline as text. Pure."""

from collections.abc import Sequence

from everstep_kubectl import text
from everstep_kubectl.incidents import UNFINISHED, Cost, Incident


def render(job: str, incidents: Sequence[Incident], *, whole: bool, now: float) -> str:
    """`whole`: whether all wanted pods of the job train now."""
    if not incidents:
        return f"{job}: no interruption so far"
    return "\n\n".join(_one(i, whole=whole, now=now) for i in incidents)


def _one(incident: Incident, *, whole: bool, now: float) -> str:
    began = text.clock(incident.started)
    head = f"{incident.id}  {incident.cause}  {began} ({text.age(incident.started, now)} ago)"
    fields = {
        "state": describe_state(incident, whole=whole),
        "what": incident.message,
        "evidence": "\n".join(_evidence(incident)),
        "verdict": incident.verdict,
        "rung": _rung(incident),
        "checkpoint": describe_checkpoint(incident),
        "cost": describe_cost(incident.cost),
    }
    return "\n".join([head, text.block(fields), *_moments(incident), *_phases(incident)])


def describe_state(incident: Incident, *, whole: bool) -> str:
    if not incident.open:
        lasted = max((m.seconds for m in incident.moments), default=None)
        return "over" if lasted is None else f"over, {text.took(lasted)} after it began"
    return "its end was not recorded; the job runs" if whole else "going on"


def _evidence(incident: Incident) -> list[str]:
    return [
        f"{e.kind}{f' {e.code}' if e.code else ''} on {e.gpu}, first seen {e.first_seen}"
        for e in incident.evidence
    ]


def _rung(incident: Incident) -> str:
    slots = ", ".join(str(s) for s in incident.slots)
    where = f" off {', '.join(incident.nodes)}" if incident.nodes else ""
    whose = f"slot {slots}{where}" if slots else where.strip()
    return f"{incident.rung} ({whose})" if incident.rung and whose else incident.rung or whose


def describe_checkpoint(incident: Incident) -> str:
    if incident.checkpoint_step is None:
        return ""
    lost = incident.cost.steps_lost
    saved = (
        ", nothing was lost" if lost == 0 else f", {text.many(lost, 'step')} lost" if lost else ""
    )
    return f"continued from step {incident.checkpoint_step}{saved}"


def describe_cost(cost: Cost) -> str:
    lost = "steps lost: not recorded"
    if cost.steps_lost is not None:
        lost = f"{text.many(cost.steps_lost, 'step')} lost"
    if cost.seconds is None:
        return (
            f"not known yet: {cost.source}"
            if cost.source == UNFINISHED
            else f"{lost}; time without steps: {cost.source}"
        )
    return (
        f"{text.took(cost.seconds)} without steps ({cost.source}) x {text.many(cost.gpus, 'GPU')}"
        f" = {cost.gpu_seconds:.0f} GPU-seconds; {lost}"
    )


def _moments(incident: Incident) -> list[str]:
    if not incident.moments:
        return []
    lines = ["", "  after       moment"]
    return lines + [f"  {m.seconds:7.3f} s   {m.name:<9} {m.meaning}" for m in incident.moments]


def _phases(incident: Incident) -> list[str]:
    if not incident.phases:
        return []
    told = ", ".join(f"{p.name.replace('_', ' ')} {p.seconds:.2f} s" for p in incident.phases)
    return ["", f"  by the job's own clock: {told}"]
