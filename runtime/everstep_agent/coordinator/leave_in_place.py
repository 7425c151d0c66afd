"""Members leave a running epoch while the others continue."""

from collections.abc import Collection, Sequence

from everstep_agent.coordinator import (
    boundaries,
    due_saves,
    invitations,
    planned_moves,
    regroup,
    unit_losses,
)
from everstep_agent.coordinator.arming import arm, has_boundary_ahead
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.watch import Watch
from everstep_agent.peers.agent_report import AgentReport, WorkerReport
from everstep_agent.peers.epoch_level import Id
from everstep_contract import levels

SAVE_AGAIN_SECONDS = 5.0
"""Pause between two saves for members that leave, if the first one was not committed."""
LEAVE_SECONDS = 2.0
"""How long before the end of its notice a pod is to leave at the latest; its notice then counts as over. If it
ended by itself, it would be a lost pod, and the others could not step before their claim is in the log.
"""
REPLACEMENT_SECONDS = 10.0
"""How long a member that may leave waits until the pod that takes its place is ready. Nobody waits
if a pod has received SIGTERM.
"""


def list_leaving(term: Term) -> tuple[Id, ...]:
    """The members that are asked to leave, and those that cannot continue without them: the rest of
    their units, which stays ready and joins again.
    """
    members = term.running.members
    told = boundaries.list_terminating(members, term.recent(), coordinator=term.me.id)
    slots = {*told, *term.wanted.leave}
    return unit_losses.with_mates(term.running, [m.id for m in members if m.slot in slots])


def list_free_to_leave(term: Term, watch: Watch) -> tuple[Id, ...]:
    """The leaving members, if they may leave at the boundary at which others join; otherwise none.
    If all members are to leave, none does so here, because someone has to hand the state over.
    """
    leaving = list_leaving(term) if watch.may_leave_at is not None else ()
    return leaving if len(leaving) < len(term.running.members) else ()


def leave(
    term: Term,
    watch: Watch,
    workers: Sequence[WorkerReport],
    purpose: str,
    ready: Sequence[AgentReport],
    now: float,
) -> bool:
    """Let members leave while the others continue. Returns whether this is possible.

    All ranks save while they train. Once the save is committed, the leaving workers end at their next boundary, and
    the others continue as after a loss. If other pods are ready to take the leaving members' places, they join at
    the same time.
    """
    leaving = list_leaving(term)
    if not _can_leave(term, purpose, leaving):
        return False
    if leaving:
        _let_leave(term, watch, workers, purpose, ready, now)
    # Else only the coordinator's own pod leaves, which is no member: `note_left` makes it hand over.
    return True


def leave_at_once(
    term: Term, watch: Watch, workers: Sequence[WorkerReport], purpose: str, now: float
) -> None:
    """Let members leave without any further wait, even beside an armed boundary: the others are taken off it,
    as after a loss.
    """
    leaving = list_leaving(term)
    if not _can_leave(term, purpose, leaving):
        return
    step = _ask(term, watch, workers, purpose, now)
    _allow(term, watch, leaving, step, now)
    _end(term, leaving)


def is_notice_over(term: Term, leaving: Collection[Id]) -> bool:
    """Whether one of these members has to leave now, whatever it waits for: its notice has become too short."""
    ids = {*leaving}
    told = ((r, age) for r, age in term.reports.aged(term.now()) if r.leaving and r.id in ids)
    return any(r.notice is not None and r.notice - age <= LEAVE_SECONDS for r, age in told)


def _can_leave(term: Term, purpose: str, leaving: Sequence[Id]) -> bool:
    """Whether these members can leave while others continue."""
    if purpose not in ("Leave", "Shrink") or regroup.why_not_wanted(term):
        return False
    return len(leaving) < len(term.running.members)


def _let_leave(
    term: Term,
    watch: Watch,
    workers: Sequence[WorkerReport],
    purpose: str,
    ready: Sequence[AgentReport],
    now: float,
) -> None:
    leaving = list_leaving(term)
    step = _ask(term, watch, workers, purpose, now)
    replaced = not term.running.leaving and _replace(term, watch, leaving, ready, now)
    if watch.may_leave_at is None:
        if not (_is_committed(term, step) or _is_drain_over(term, watch, leaving, now)):
            ahead = has_boundary_ahead(term, workers)
            if ahead and _is_save_due(term, watch, step, now):
                watch.leave_saved_at = now
                arm(term, watch, workers, "", now)
            return
        _allow(term, watch, leaving, step, now)
    joins = replaced and not is_notice_over(term, leaving)
    if joins and invitations.may_claim_soon(term) and has_boundary_ahead(term, workers):
        arm(term, watch, workers, purpose, now, hold=True)
    elif not (
        _awaits_replacement(term, watch, now)
        or _avoids_a_restart(term, watch, workers, leaving, now)
    ):
        _end(term, leaving)


def _ask(
    term: Term, watch: Watch, workers: Sequence[WorkerReport], purpose: str, now: float
) -> int:
    """Note that members are asked to leave, and open the incident. Returns the furthest worker's step when they
    were asked.
    """
    if watch.leave_at is None:
        watch.leave_at = max((w.applied for w in workers), default=0)
        watch.leave_since, watch.leave_saved_at = now, None
        watch.move = planned_moves.build_move(term, purpose, term.recent())
    planned_moves.open_move(term, watch)
    return watch.leave_at


def _allow(term: Term, watch: Watch, leaving: Sequence[Id], step: int, now: float) -> None:
    """Note that the members may leave now, and say so if their state is not committed."""
    if watch.may_leave_at is not None:
        return
    watch.may_leave_at = now
    if not _is_committed(term, step):
        _say_unsaved(term, leaving)


def _end(term: Term, leaving: tuple[Id, ...]) -> None:
    """Have the agents end these members' workers, at their next boundary if there is time (`pod/leaving.py`)."""
    if term.running.leaving == leaving:
        return
    term.line.say("members_leave", slots=",".join(str(slot) for slot, _, _ in leaving))
    term.mark("drain")
    term.change(term.state.let_leave(leaving))


def _is_drain_over(term: Term, watch: Watch, leaving: Sequence[Id], now: float) -> bool:
    """Whether the members have waited long enough for the commit of their state: the others hold the same."""
    waited = now - watch.leave_since
    return waited >= term.settings.drain_seconds or is_notice_over(term, leaving)


def _avoids_a_restart(
    term: Term,
    watch: Watch,
    workers: Sequence[WorkerReport],
    leaving: Sequence[Id],
    now: float,
) -> bool:
    """Whether the members wait because a rank is in `job.evaluate` or `job.sum`, or has taken the last step: a loss
    would restart all ranks, and there is time to wait for its end.
    """
    evaluates = any(w.scope is levels.Scope.EVALUATE for w in workers)
    inside = evaluates or not has_boundary_ahead(term, workers)
    return inside and not _is_drain_over(term, watch, leaving, now)


def _is_committed(term: Term, step: int) -> bool:
    return term.running.committed >= max(1, step)


def _say_unsaved(term: Term, leaving: Sequence[Id]) -> None:
    slots = ", ".join(str(slot) for slot, _, _ in leaving)
    if is_notice_over(term, leaving):
        limit = f"until {LEAVE_SECONDS:g} s before the end of the pod's grace period"
        advice = "For slow stores raise terminationGracePeriodSeconds"
    else:
        limit = f"within {term.settings.drain_seconds:.0f} s"
        advice = "For slow stores raise recovery.drainTimeoutSeconds"
    text = (
        f"slot {slots} leaves without a checkpoint, because none was committed {limit}; the others hold the same state "
        f"and continue. {advice}"
    )
    term.line.say("leaves_unsaved", message=text)
    term.change(term.state.note(text))


def _is_save_due(term: Term, watch: Watch, step: int, now: float) -> bool:
    if due_saves.is_saving(term) or due_saves.is_under_way(term, step):
        return False
    return watch.leave_saved_at is None or now - watch.leave_saved_at >= SAVE_AGAIN_SECONDS


def _replace(
    term: Term,
    watch: Watch,
    leaving: Sequence[Id],
    ready: Sequence[AgentReport],
    now: float,
) -> bool:
    """Invite pods to take the places of `leaving`. Returns whether these are ready to join."""
    staying = len(term.running.members) - len(leaving)
    return invitations.invite(term, watch, ready, term.wanted.want_workers - staying, now)


def _awaits_replacement(term: Term, watch: Watch, now: float) -> bool:
    """Whether the members that may leave still wait for the pods that take their places."""
    told = boundaries.list_terminating(term.running.members, term.recent(), coordinator=term.me.id)
    since = watch.may_leave_at
    late = since is None or now - since > REPLACEMENT_SECONDS
    return bool(term.running.joining) and not told and not late and invitations.may_claim_soon(term)
