"""The last ten interruptions with the time of each phase: what the operator saw and what the job
measured, under one id.

Which id that is `membership.choose_incident` decides: a decision that belongs to what the job lives
through carries the job's id, so here equal ids are one incident. Two ids meet only where both sides
noticed something before they heard of each other; the record then keeps both (`job_id`). A death
that the job had mended in place when the verdict came stays what it was, an interruption of its
own, and bears the verdict's `quarantine`: one fault, two interruptions.
"""

from collections.abc import Sequence

from everstep_contract.levels import RuntimeIncident
from everstep_operator.jobs.membership import Decision, Leave, Raise, Stay
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.stamps import to_fine_stamp, to_seconds
from everstep_operator.model_status import Incident, Mark, PhaseTiming, SlotStatus
from everstep_operator.values import NodeVerdict

KEPT = 10
ECHO_SECONDS = 120.0
"""A rank that died so shortly before its node's verdict died of the same fault."""


def build_incidents(
    observed: Observed, records: Sequence[SlotStatus], decisions: Sequence[Decision], now: float
) -> list[Incident]:
    """The list as it should be now; equal input gives an equal list, so a quiet job writes nothing."""
    incidents = list(observed.job.status.incidents)
    for decision in decisions:
        incidents = _with_decision(observed, incidents, decision, now)
    attempts = {r.slot: r.attempt for r in records}
    incidents = [_marked(observed, i, attempts, decisions, now) for i in incidents]
    for runtime in _recent(incidents, observed.seen.incidents if observed.seen else ()):
        incidents = _with_runtime(incidents, runtime, now, observed.job.status.step or 0)
    return incidents[-KEPT:]


def _recent(
    incidents: Sequence[Incident], told: Sequence[RuntimeIncident]
) -> Sequence[RuntimeIncident]:
    """Those that we know and those told after them: what was dropped as too old does not come back."""
    known = {i.id for i in incidents} | {i.job_id for i in incidents}
    last = max((k for k, runtime in enumerate(told) if runtime.id in known), default=-1)
    return [runtime for k, runtime in enumerate(told) if k > last or runtime.id in known]


def _with_decision(
    observed: Observed, incidents: list[Incident], decision: Decision, now: float
) -> list[Incident]:
    if isinstance(decision, Stay) or (isinstance(decision, Leave) and decision.hold):
        return incidents
    if isinstance(decision, Raise) and not decision.counted:
        return incidents
    ours = [i for i in incidents if i.id == decision.incident and i.attempt is not None]
    if any(i.slot == decision.slot for i in ours):
        return incidents
    opened = _opened(observed, decision, now)
    told = [i for i in incidents if i.open and i.attempt is None and _explains(decision, i)]
    taken = told[-1] if told else None
    others = [_explained(i, decision, now) for i in incidents if i is not taken]
    return [*others, _absorbed(opened, taken) if taken else opened]


def _explains(decision: Leave | Raise, told: Incident) -> bool:
    return told.id == decision.incident or told.slot == decision.slot


def _explained(incident: Incident, decision: Leave | Raise, now: float) -> Incident:
    """What the job had mended by itself before anybody could say why."""
    began = to_seconds(incident.started_at) or 0.0
    of_the_job = incident.attempt is None and incident.slot == decision.slot
    if not (of_the_job and decision.verdict and now - began <= ECHO_SECONDS):
        return incident
    return incident.model_copy(update={"quarantine": incident.quarantine or decision.verdict})


def _absorbed(opened: Incident, told: Incident) -> Incident:
    """The job lost a rank, and now we know why: one incident, which began when the job noticed."""
    return opened.model_copy(
        update={
            "job_id": told.id if told.id != opened.id else None,
            "rung": told.rung,
            "resumed_step": told.resumed_step,
            "steps_lost": told.steps_lost,
            "phases": told.phases,
            "started_at": min(opened.started_at, told.started_at),
        }
    )


def _opened(observed: Observed, decision: Leave | Raise, now: float) -> Incident:
    attempt = decision.attempt if isinstance(decision, Leave) else decision.to - 1
    verdict = observed.verdicts.get(decision.node)
    started = min([now, *(verdict.marks.values() if verdict else ())])
    return Incident(
        id=decision.incident,
        cause=decision.cause,
        message=decision.message[:2048],
        node=decision.node or None,
        quarantine=decision.verdict or None,
        slot=decision.slot,
        attempt=attempt,
        started_at=to_fine_stamp(started),
    )


def _marked(
    observed: Observed,
    incident: Incident,
    attempts: dict[int, int],
    decisions: Sequence[Decision],
    now: float,
) -> Incident:
    """Marks are set once and never move."""
    if not incident.open or incident.slot is None or incident.attempt is None:
        return incident
    start = to_seconds(incident.started_at) or now
    marks = {m.name: m.seconds for m in incident.marks}
    for name, at in _happened(observed, incident, attempts, decisions, now):
        marks.setdefault(name, round(max(0.0, at - start), 3))
    return incident.model_copy(
        update={
            "marks": [Mark(name=n, seconds=s) for n, s in marks.items()],
            "open": "running" not in marks,
        }
    )


def _happened(
    observed: Observed,
    incident: Incident,
    attempts: dict[int, int],
    decisions: Sequence[Decision],
    now: float,
) -> list[tuple[str, float]]:
    """Phases that have been reached, with the moment at which they were."""
    slot, old = incident.slot or 0, incident.attempt or 0
    current = attempts.get(slot, old)
    verdict = observed.verdicts.get(incident.node or "")
    found = list(verdict.marks.items()) if verdict and _is_of(incident, verdict) else []
    if any(isinstance(d, Leave) and d.slot == slot for d in decisions):
        found.append(("leave", now))
    if observed.has_left(slot, old):
        found += [("commit", now), ("left", now)]
    former = observed.pod_of(slot, old)
    if current > old and (former is None or former.deleting or former.over):
        found.append(("deleted", now))
    if current > old and observed.pod_of(slot, current) is not None:
        found.append(("created", now))
    if current > old and observed.running and _is_filled(observed, slot, current):
        found.append(("running", now))
    return found


def _is_of(incident: Incident, verdict: NodeVerdict) -> bool:
    return verdict.incident in (incident.id, incident.quarantine)


def _is_filled(observed: Observed, slot: int, attempt: int) -> bool:
    """Its next pod is a member; a slot that is not wanted any more waits for none."""
    spec = observed.job.spec
    unwanted = spec is not None and slot >= spec.workers.replicas
    return unwanted or observed.is_member(slot, attempt)


def _with_runtime(
    incidents: list[Incident], runtime: RuntimeIncident, now: float, reached: int
) -> list[Incident]:
    """The job's own record of an interruption joins ours of the same id, or of the same slot and time."""
    at = next((k for k, i in enumerate(incidents) if runtime.id in (i.id, i.job_id)), None)
    if at is None and runtime.open:
        same = [k for k, i in enumerate(incidents) if i.open and _may_be(i, runtime)]
        at = same[-1] if same else None
    if at is None:
        mended = _merged(_of_runtime(runtime, now), runtime, reached)
        return [*incidents, _explained_late(mended, incidents)]
    return [*incidents[:at], _merged(incidents[at], runtime, reached), *incidents[at + 1 :]]


def _explained_late(mended: Incident, incidents: Sequence[Incident]) -> Incident:
    """Heard of after the verdict, and over before the slot's next pod: the former one lived through it."""
    under_way = [i for i in incidents if i.open and i.attempt is not None and i.slot == mended.slot]
    why = next((i.quarantine for i in under_way if i.quarantine), None)
    return mended.model_copy(update={"quarantine": why}) if why and not mended.open else mended


def _may_be(incident: Incident, runtime: RuntimeIncident) -> bool:
    """The same slot; a leave that the job began by itself (SIGTERM) may not say which."""
    if runtime.slot is None:
        return runtime.cause == "Leave" and incident.attempt is not None
    return incident.slot == runtime.slot


def _of_runtime(runtime: RuntimeIncident, now: float) -> Incident:
    took = sum(p.ms for p in runtime.phases) / 1000
    return Incident(
        id=runtime.id[:128],
        cause=runtime.cause[:64],
        message=runtime.message[:2048],
        slot=runtime.slot,
        started_at=to_fine_stamp(now - took),
    )


def _merged(incident: Incident, runtime: RuntimeIncident, reached: int) -> Incident:
    """`open` of an incident that moves a slot is ours to close; of any other it is the job's.

    What a former coordinator told of it stays: its successor may be a newcomer.
    """
    told = {p.name[:32]: p.ms for p in runtime.phases[:16]}
    phases = {**{p.name: p.ms for p in incident.phases}, **told}
    return incident.model_copy(
        update={
            "job_id": runtime.id[:128] if runtime.id != incident.id else incident.job_id,
            "rung": runtime.rung[:32] or incident.rung,
            "resumed_step": runtime.step or incident.resumed_step,
            "steps_lost": _count_lost(incident, runtime, reached),
            "phases": [PhaseTiming(name=n, ms=ms) for n, ms in list(phases.items())[:16]],
            "open": incident.open if incident.attempt is not None else runtime.open,
        }
    )


def _count_lost(incident: Incident, runtime: RuntimeIncident, reached: int) -> int | None:
    """`reached`: the furthest step that we knew of, which no newcomer can know."""
    if runtime.cause != "Replaced":
        return max(runtime.steps_lost, incident.steps_lost or 0)
    if incident.steps_lost is not None or not runtime.step:
        return incident.steps_lost
    return max(0, reached - runtime.step)
