"""One turn of a running epoch's boundary: arm it, confirm it, raise it, or end the epoch at it.

The decisions are made in `boundaries.py`.
"""

from collections.abc import Sequence

from everstep_agent.coordinator import (
    arming,
    boundaries,
    due_saves,
    invitations,
    join_rules,
    leave_in_place,
    members,
    planned_moves,
)
from everstep_agent.coordinator.gather import stop_here
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.watch import Watch
from everstep_agent.peers.agent_report import AgentReport, State, WorkerReport
from everstep_agent.peers.epoch_level import Boundary
from everstep_contract import levels

ARM_SECONDS = 60.0
"""Limit for all agents to acknowledge a boundary. They do so at once, however long a step takes."""


def settle(term: Term, watch: Watch, workers: Sequence[WorkerReport], now: float) -> bool:
    """Take one turn. Returns whether the epoch is over at its boundary."""
    epoch = term.running
    boundary = epoch.boundary
    if boundary is None:
        _arm(term, watch, workers, now)
        return False
    if not boundary.stay and arming.is_beyond_end(term, boundary.step):
        arming.disarm(term, watch, boundary, now)
        return False
    planned_moves.open_move(term, watch)
    if not boundary.stay:
        _leave_at_once(term, watch, workers, now)
    if not (boundary.stay or boundary.hold):
        _invite_meanwhile(term, watch, now)
    moved = boundaries.advance(boundary, epoch.members, term.recent(), raises=watch.raises)
    if moved != boundary:
        watch.raises += moved.step != boundary.step
        term.change(term.state.arm(moved))
        return False
    if not boundary.confirmed:
        if now - watch.armed_at > ARM_SECONDS:
            _give_up(term, watch, boundary, now)
        return False
    if boundary.hold:
        return False  # `join.admit` ends it
    if boundary.stay:
        return _stay(term, watch, boundary, workers)
    if _is_over(term, boundary, workers):
        if not boundary.near:
            watch.saved = boundary.step
        arming.disarm(term, watch, boundary, now)
    return False


def _is_over(term: Term, boundary: Boundary, workers: Sequence[WorkerReport]) -> bool:
    """Whether the save of this boundary is complete, or the ranks have gone on while they make it."""
    if boundary.near:
        held = members.find_held(term.running, term.reports.all())
        return held >= boundary.step or all(w.applied > boundary.step for w in workers)
    gone_on = all(w.applied > boundary.step + 1 for w in workers)
    return term.running.committed >= boundary.step or gone_on


def _give_up(term: Term, watch: Watch, boundary: Boundary, now: float) -> None:
    """Drop the boundary, because an agent does not answer although the job may still step. The
    boundary's purpose is tried again.
    """
    acked = {r.id for r in term.recent() if r.acked == boundary.step}
    silent = ", ".join(str(m.slot) for m in term.running.members if m.id not in acked)
    text = (
        f"the ranks could not agree to save or stop at step {boundary.step}, because slot {silent} did not answer "
        f"within {ARM_SECONDS:.0f} s; Everstep tries again at a later step"
    )
    term.line.say("boundary_given_up", step=boundary.step, message=text)
    arming.disarm(term, watch, boundary, now)
    term.change(term.state.note(text))


def _arm(term: Term, watch: Watch, workers: Sequence[WorkerReport], now: float) -> None:
    if not _all_answer(term):
        return  # it is unknown what silent members can do, and no boundary would be confirmed
    ready = invitations.list_ready(term, now)
    in_place, purpose = _choose_purpose(term, watch, ready, now)
    if in_place and leave_in_place.leave(term, watch, workers, purpose, ready, now):
        return
    watch.leave_at = watch.may_leave_at = None
    invitations.withdraw(term)
    if purpose not in levels.IN_ORDER or purpose == "Grow":
        planned_moves.withdraw_move(term, purpose)
    joins = purpose == "Grow" and in_place
    if joins and not _can_join_now(term, watch, ready, now):
        purpose, joins = "", False
    if not arming.has_boundary_ahead(term, workers) and (joins or not purpose):
        return
    saves = (
        purpose
        or due_saves.is_save_due(term, watch, now)
        or due_saves.is_dropped_due(term, watch, workers, now)
        or due_saves.is_pin_due(term, watch, now)
    )
    if not saves:
        if due_saves.is_near_due(term, watch, workers, now):
            arming.arm(term, watch, workers, "", now, near=True)
        return
    # A worker that joins in place interrupts nobody: that is no incident.
    watch.move = None if joins else planned_moves.build_move(term, purpose, term.recent())
    planned_moves.open_move(term, watch)
    arming.arm(term, watch, workers, purpose, now, hold=joins)


def _can_join_now(term: Term, watch: Watch, ready: Sequence[AgentReport], now: float) -> bool:
    """Invite newcomers. Returns whether the next boundary can be the one at which they join."""
    invited = invitations.invite_missing(term, watch, ready, now)
    if not invitations.may_claim_soon(term):
        return False
    return invited or invitations.leave_out_late(term, watch, now)


def _all_answer(term: Term) -> bool:
    return {m.id for m in term.running.members} <= {r.id for r in term.recent()}


def _choose_purpose(
    term: Term, watch: Watch, ready: Sequence[AgentReport], now: float
) -> tuple[bool, str]:
    """Whether newcomers can join and members leave in place, and why the epoch should end at a
    boundary (`boundaries.why_stay`). Notes in `watch` since when a pod has been ready.
    """
    epoch, recent = term.running, term.recent()
    others = join_rules.list_others(epoch, ready)
    in_place = bool(term.settings.in_place) and join_rules.can_join(epoch, recent)
    whole = epoch.slots_together * len(
        join_rules.list_blocks(epoch, ready, invitations.list_coming(term, watch, ready, now))
    )
    watch.ready_at = (watch.ready_at or now) if whole else None
    purpose = boundaries.why_stay(
        term.wanted,
        epoch.members,
        recent,
        whole,
        returning=in_place and len(others) < len(ready),
        coordinator=term.me.id,
        waited=now - (watch.ready_at or now),
        gang=0.0 if in_place else term.settings.gang_seconds,
    )
    return in_place, purpose or boundaries.why_renew(term.wanted, epoch)


def _leave_at_once(term: Term, watch: Watch, workers: Sequence[WorkerReport], now: float) -> None:
    """Let pods leave whose notice is over before the boundary is."""
    if not leave_in_place.is_notice_over(term, leave_in_place.list_leaving(term)):
        return
    in_place, purpose = _choose_purpose(term, watch, invitations.list_ready(term, now), now)
    if in_place:
        leave_in_place.leave_at_once(term, watch, workers, purpose, now)


def _invite_meanwhile(term: Term, watch: Watch, now: float) -> None:
    """Invite newcomers although a boundary is armed at which the ranks only save: they get ready
    until the save is done.
    """
    ready = invitations.list_ready(term, now) if _all_answer(term) else []
    if ready and _choose_purpose(term, watch, ready, now) == (True, "Grow"):
        invitations.invite_missing(term, watch, ready, now)


def _stay(term: Term, watch: Watch, boundary: Boundary, workers: Sequence[WorkerReport]) -> bool:
    """End the epoch once all ranks are parked at the boundary and their save is committed. Returns
    whether the epoch is over.
    """
    if not all(w.state in (State.PARKED, State.FINISHED) for w in workers):
        return False
    term.mark("boundary")
    if term.running.committed < boundary.step:
        return False
    incidents = term.state.incidents.mark("commit", term.now()).resumes(boundary.step, 0)
    term.group.open_epoch(0)
    term.change(term.state.with_incidents(incidents).end_epoch(watch.purpose))
    term.line.say(
        "epoch_over", epoch=term.running.number, step=boundary.step, purpose=watch.purpose
    )
    term.note_left()
    if term.wanted.stop is not levels.Stop.NONE:
        stop_here(term)
    return True
