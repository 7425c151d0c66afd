"""The job's last interruptions: the operator's observations (marks) and the job's measurements
(phases) under one id. Pure.

One fault is one incident, however many slots it moves; `faults` decides which incident a decision
belongs to. An incident has two ids only if the operator and the job each noticed something before
they learned of each other; the record then keeps both (`job_id`). If the job had already recovered
from a death when the verdict came, the death stays an entry of its own, with the verdict's
`quarantine`: both entries are counted and reported as one (`faults.group_by_fault`).
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from everstep_contract.levels import RuntimeIncident
from everstep_operator.jobs.echoes import ECHO_SECONDS, link_verdicts, rename_verdicts
from everstep_operator.jobs.faults import group_by_fault
from everstep_operator.jobs.marks import (
    build_scene,
    is_withdrawn,
    list_moved,
    reopen,
    set_marks,
)
from everstep_operator.jobs.membership import UNCOUNTED, Decision, Leave, Raise, Stay
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.stamps import to_fine_stamp, to_seconds
from everstep_operator.model_status import Incident, Mark, MovedSlot, PhaseTiming

KEPT = 10
"""How many closed faults are kept (`faults.group_by_fault`)."""
KEPT_UNEXPLAINED = 20
"""How many closed faults are kept while a verdict may still explain them: a rank on a bad GPU may die many times before
the verdict.
"""
MOST = 64
"""Limit of all incidents; open ones are kept up to this limit."""
POD_LOST = frozenset({"AgentLost", "CoordinatorLost", "Gone"})
"""Causes with which the job reports the loss of a complete pod."""
UNEXPLAINED = frozenset({"GroupBroken", "GroupStuck", "CoordinatorLost"})
"""Causes that name no member: a more precise cause may follow."""


def build_incidents(
    observed: Observed, attempts: Mapping[int, int], decisions: Sequence[Decision], now: float
) -> list[Incident]:
    """The list as it should be now; equal input gives an equal list, so an undisturbed job causes
    no write.

    `attempts`: slot → current attempt.
    """
    known = rename_verdicts(observed, observed.job.status.incidents)
    incidents = _with_decisions(observed, known, decisions, now)
    scene = build_scene(observed, attempts, decisions, now)
    incidents = [set_marks(scene, i) for i in incidents]
    told = _recent(incidents, observed.seen.incidents if observed.seen else ())
    for runtime in told:
        incidents = _with_runtime(incidents, runtime, now, observed.job.status.step or 0)
    for decision in decisions:
        # A spare has already taken the slot's place, and this `seen` is the first to report it.
        if isinstance(decision, Leave | Raise) and decision.spare:
            incidents = [_explained(i, decision, now) for i in incidents]
    incidents = _close_forgotten(observed, incidents)
    linked = link_verdicts(observed, _folded(incidents), now)
    return _keep(observed, _with_plain_moves(_with_shares(linked, told)), now)


def _keep(observed: Observed, incidents: Sequence[Incident], now: float) -> list[Incident]:
    """Drop old closed faults. All incidents of a fault stay or go together, because only one of them
    has its charge. The newest fault with phases stays, so that what the job reported before it is
    not mistaken for new. A fault that ends in this pass stays, so that its end is reported. So does
    one that a verdict may still explain, because its charge then moves.
    """
    was_open = {i.id for i in observed.job.status.incidents if i.open}
    closed = [f for f in group_by_fault(incidents) if not any(i.open for i in f)]
    told = [f for f in closed if any(i.phases for i in f)]
    ended = [f for f in closed if any(i.id in was_open for i in f)]
    young = [f for f in closed if any(_may_be_explained(i, now) for i in f)][-KEPT_UNEXPLAINED:]
    kept = {id(i) for fault in (*closed[-KEPT:], *told[-1:], *ended, *young) for i in fault}
    gone = {id(i) for fault in closed for i in fault} - kept
    return _limit([i for i in incidents if id(i) not in gone])


def _limit(incidents: Sequence[Incident]) -> list[Incident]:
    """Keep at most `MOST`. The oldest that are neither open nor hold their fault's charge go first."""
    spare = [id(i) for i in incidents if not (i.open or i.charged)]
    gone = {*spare[: max(0, len(incidents) - MOST)]}
    return [i for i in incidents if id(i) not in gone][-MOST:]


def _may_be_explained(incident: Incident, now: float) -> bool:
    """Whether this interruption was counted, only the job has told of it, and a verdict may still explain it."""
    if incident.slot is None or incident.quarantine or list_moved(incident):
        return False
    young = now - (to_seconds(incident.started_at) or 0.0) <= ECHO_SECONDS
    return incident.charged is not None and young


def _recent(
    incidents: Sequence[Incident], told: Sequence[RuntimeIncident]
) -> Sequence[RuntimeIncident]:
    """The job's incidents that are known, and those reported after them: entries that were dropped
    as too old do not return.
    """
    known = {i.id for i in incidents} | {i.job_id for i in incidents}
    last = max((k for k, runtime in enumerate(told) if runtime.id in known), default=-1)
    return [runtime for k, runtime in enumerate(told) if k > last or runtime.id in known]


# --- what the operator decides ----------------------------------------------------------------------------


def _with_decisions(
    observed: Observed, incidents: Sequence[Incident], decisions: Iterable[Decision], now: float
) -> list[Incident]:
    """A job may lose thousands of slots at once. So moves are found by their id, and only the few
    incidents that move no slot, which are the job's own reports, are searched for each decision.
    """
    found, places = dict(enumerate(incidents)), itertools.count(len(incidents))
    told = [k for k, i in found.items() if not list_moved(i)]
    moves = {i.id: k for k, i in reversed(found.items()) if list_moved(i)}
    joining: dict[int, list[Leave | Raise]] = {}
    for decision in _list_moves(decisions):
        same = [k for k in told if _is_same_loss(found[k], decision, now)]
        at = moves.get(decision.incident)
        if at is not None and not (decision.spare and not same):
            joining.setdefault(at, []).append(decision)
            continue
        if not decision.spare or same:
            opened = _opened(observed, decision, now)
            if same:
                told.remove(same[-1])
                opened = _absorbed(opened, found.pop(same[-1]))
            moves[opened.id] = next(places)
            found[moves[opened.id]] = opened
        found |= {k: _explained(found[k], decision, now) for k in told}
    found |= {k: _joined(found[k], others) for k, others in joining.items()}
    return list(found.values())


def _list_moves(decisions: Iterable[Decision]) -> Iterator[Leave | Raise]:
    """The decisions from which an incident follows: the slot is lost, or has to leave its node."""
    for decision in decisions:
        if isinstance(decision, Stay) or (isinstance(decision, Leave) and decision.hold):
            continue
        if isinstance(decision, Raise) and not decision.counted:
            continue
        if decision.spare and decision.cause in UNCOUNTED:  # no loss: the spare is not needed
            continue
        yield decision


def _moved(decision: Leave | Raise) -> MovedSlot:
    attempt = decision.attempt if isinstance(decision, Leave) else decision.to - 1
    return MovedSlot(slot=decision.slot, attempt=attempt)


def _joined(incident: Incident, decisions: Iterable[Leave | Raise]) -> Incident:
    """Add the other slots that the same fault moves; each slot is added once."""
    incident = reopen(incident)
    moved = list_moved(incident)
    known = {m.slot for m in moved}
    more = [_moved(d) for d in decisions if d.slot not in known]
    if not (incident.open and more):
        return incident
    return incident.model_copy(update={"slots": [*moved, *more]})


def _explains(decision: Leave | Raise, told: Incident) -> bool:
    return told.id == decision.incident or told.slot == decision.slot


def _is_same_loss(told: Incident, decision: Leave | Raise, now: float) -> bool:
    """Whether the job's incident `told` and this decision are about the same loss: the incident is
    still open, or the job lost a complete pod and continued in place before the operator knew.
    """
    if list_moved(told) or not _explains(decision, told):
        return False
    began = to_seconds(told.started_at) or 0.0
    lost = told.cause in POD_LOST and told.quarantine is None and now - began <= ECHO_SECONDS
    return told.open or lost


def _explained(incident: Incident, decision: Leave | Raise, now: float) -> Incident:
    """Give the verdict's quarantine to an interruption from which the job had recovered before the
    verdict.
    """
    of_the_job = not list_moved(incident) and incident.slot == decision.slot
    if not (of_the_job and decision.verdict):
        return incident
    began = to_seconds(incident.started_at) or 0.0
    if now - began > ECHO_SECONDS:
        return incident
    return incident.model_copy(update={"quarantine": incident.quarantine or decision.verdict})


def _absorbed(opened: Incident, told: Incident, *, charged: str | None = None) -> Incident:
    """Merge the job's report of a loss into the incident that explains it: one incident, which
    began when the first of the two did.
    """
    started = min(opened.started_at, told.started_at)
    earlier = (to_seconds(opened.started_at) or 0.0) - (to_seconds(started) or 0.0)
    return opened.model_copy(
        update={
            "job_id": told.id if told.id != opened.id else None,
            "charged": told.charged or charged,
            "rung": told.rung,
            "resumed_step": told.resumed_step,
            "steps_lost": told.steps_lost,
            "recovery_seconds": told.recovery_seconds,
            "phases": told.phases,
            "started_at": started,
            "marks": [
                Mark(name=m.name, seconds=round(m.seconds + earlier, 3)) for m in opened.marks
            ],
        }
    )


def _opened(observed: Observed, decision: Leave | Raise, now: float) -> Incident:
    verdict, moved = observed.verdicts.get(decision.node), _moved(decision)
    started = min([now, *(verdict.marks.values() if verdict else ())])
    return Incident(
        id=decision.incident,
        cause=decision.cause,
        message=decision.message[:2048],
        node=decision.node or None,
        quarantine=decision.verdict or None,
        slot=moved.slot,
        attempt=moved.attempt,
        slots=[moved],
        started_at=to_fine_stamp(started),
    )


def _folded(incidents: Sequence[Incident]) -> list[Incident]:
    """Merge the job's reports of a loss into the open move of the slot: the job noticed the loss
    before it knew the slot, or has already recovered from it.
    """
    found = list(incidents)
    for told in incidents:
        if list_moved(told) or told.charged or told.slot is None or told.quarantine:
            continue
        at = next((k for k, i in enumerate(found) if _takes_up(i, told)), None)
        if at is not None:
            found[at] = _absorbed(found[at], told, charged=found[at].charged)
            found.remove(told)
    return found


def _takes_up(move: Incident, told: Incident) -> bool:
    """Whether the report belongs to this move: the move is open, concerns the slot, and has no
    other report of the job yet.
    """
    began, moved = to_seconds(told.started_at) or 0.0, to_seconds(move.started_at) or 0.0
    free = move.open and not move.phases and move.job_id is None
    return free and moved - began <= ECHO_SECONDS and _concerns(move, told.slot)


def _with_shares(incidents: Sequence[Incident], told: Sequence[RuntimeIncident]) -> list[Incident]:
    """Several nodes lost at once are one interruption for the job, but one fault per node for the
    operator. What the job has measured belongs to the first node's incident; the others are moves
    that interrupted nothing more.
    """
    return [
        i.model_copy(update={"rung": "move", "steps_lost": 0})
        if not (i.phases or i.rung or i.job_id) and any(_is_share(i, r, incidents) for r in told)
        else i
        for i in incidents
    ]


def _is_share(move: Incident, runtime: RuntimeIncident, incidents: Sequence[Incident]) -> bool:
    if not any(m.slot in runtime.slots and m.slot != runtime.slot for m in list_moved(move)):
        return False
    owners = [i for i in incidents if i is not move and runtime.id in (i.id, i.job_id)]
    began = to_seconds(move.started_at) or 0.0
    return any(0 <= began - (to_seconds(o.started_at) or 0.0) <= ECHO_SECONDS for o in owners)


def _with_plain_moves(incidents: Sequence[Incident]) -> list[Incident]:
    """Mark each move that interrupted nothing: the job had already continued without the slot when
    the verdict came. A slot that has left in order has lost nothing either. If all pods leave at
    nearly the same time, nobody may be left to report each leave; the restart is reported once.
    A move that was withdrawn was none.
    """
    mended = {i.quarantine for i in incidents if not i.open and i.phases} - {None}

    def is_plain(move: Incident) -> bool:
        moved = list_moved(move)
        left = move.quarantine in mended or all(m.left for m in moved)
        return bool(moved) and (left or is_withdrawn(move))

    return [
        i.model_copy(update={"rung": None if is_withdrawn(i) else "move", "steps_lost": 0})
        if not (i.open or i.phases or i.rung) and is_plain(i)
        else i
        for i in incidents
    ]


def _close_forgotten(observed: Observed, incidents: Sequence[Incident]) -> list[Incident]:
    """Close what the job does not report although it trains: every agent that knew of it has ended."""
    if not observed.running or observed.seen is None:
        return list(incidents)
    told = {i.id for i in observed.seen.incidents}
    return [
        i.model_copy(update={"open": False})
        if i.open and not list_moved(i) and not told & {i.id, i.job_id}
        else i
        for i in incidents
    ]


# --- what the job reports ------------------------------------------------------------------------


def _with_runtime(
    incidents: list[Incident], runtime: RuntimeIncident, now: float, reached: int
) -> list[Incident]:
    """Merge the job's own record of an interruption into the operator's with the same id, or into
    an open one of the same slot; otherwise add it.
    """
    at = next((k for k, i in enumerate(incidents) if runtime.id in (i.id, i.job_id)), None)
    if at is None and runtime.open:
        same = [k for k, i in enumerate(incidents) if i.open and _may_be(i, runtime)]
        at = same[-1] if same else None
    if at is None:
        mended = _merged(_of_runtime(runtime, now), runtime, reached)
        return [*incidents, _explained_late(mended, incidents)]
    return [*incidents[:at], _merged(incidents[at], runtime, reached), *incidents[at + 1 :]]


def _explained_late(mended: Incident, incidents: Sequence[Incident]) -> Incident:
    """Link an interruption that the job reports after the verdict, although it has already
    recovered, to the verdict's quarantine.
    """
    under_way = [i for i in incidents if i.open and _concerns(i, mended.slot)]
    why = next((i.quarantine for i in under_way if i.quarantine), None)
    return mended.model_copy(update={"quarantine": why}) if why and not mended.open else mended


def _concerns(incident: Incident, slot: int | None) -> bool:
    return any(m.slot == slot for m in list_moved(incident))


def _may_be(incident: Incident, runtime: RuntimeIncident) -> bool:
    """Whether both are about the same slot. A leave that the job started by itself (SIGTERM) may
    not name one.
    """
    if runtime.slot is None:
        return runtime.cause == "Leave" and bool(list_moved(incident))
    return incident.slot == runtime.slot or _concerns(incident, runtime.slot)


def _of_runtime(runtime: RuntimeIncident, now: float) -> Incident:
    took = sum(p.ms for p in runtime.phases) / 1000
    return Incident(
        id=runtime.id[:128], cause=runtime.cause[:64], started_at=to_fine_stamp(now - took)
    )


def _merged(incident: Incident, runtime: RuntimeIncident, reached: int) -> Incident:
    """Merge the job's report into the incident. If the incident moves a slot, the operator sets
    `open` and the texts; otherwise the job does.

    What a former coordinator reported is kept: its successor may be new to the job.
    """
    told = {p.name[:32]: p.ms for p in runtime.phases[:16]}
    phases = {**{p.name: p.ms for p in incident.phases}, **told}
    return incident.model_copy(
        update={
            **({} if list_moved(incident) else _words(runtime)),
            "job_id": runtime.id[:128] if runtime.id != incident.id else incident.job_id,
            "rung": runtime.rung[:32] or incident.rung,
            "resumed_step": runtime.step or incident.resumed_step,
            "steps_lost": _count_lost(incident, runtime, reached),
            "phases": [PhaseTiming(name=n, ms=ms) for n, ms in list(phases.items())[:16]],
        }
    )


def _words(runtime: RuntimeIncident) -> dict[str, object]:
    """The job's texts, which change if the cause becomes known later."""
    return {
        "cause": runtime.cause[:64],
        "message": runtime.message[:2048],
        "slot": runtime.slot,
        "open": runtime.open,
    }


def _count_lost(incident: Incident, runtime: RuntimeIncident, reached: int) -> int | None:
    """`reached`: the furthest known step, which a new coordinator cannot know."""
    if runtime.cause != "Replaced":
        return max(runtime.steps_lost, incident.steps_lost or 0)
    if incident.steps_lost is not None or not runtime.step:
        return incident.steps_lost
    return max(0, reached - runtime.step)
