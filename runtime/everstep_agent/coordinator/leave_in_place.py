"""Members leave a running epoch while the others continue."""

from collections.abc import Sequence

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
"""How long before the end of its notice a pod is to leave at the latest. If it ended by itself, it would
be a lost pod, and the others could not step before their claim is in the log.
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

    All ranks save while they train. Once the save is committed, the leaving workers end, and the
    others continue as after a loss. If other pods are ready to take the leaving members' places,
    they join at the same time.
    """
    if purpose not in ("Leave", "Shrink") or regroup.why_not_wanted(term):
        return False
    leaving = list_leaving(term)
    if len(leaving) == len(term.running.members):
        return False
    if leaving:
        _let_leave(term, watch, workers, purpose, ready, now)
    # Else only the coordinator's own pod leaves, which is no member: `note_left` makes it hand over.
    return True


def _let_leave(
    term: Term,
    watch: Watch,
    workers: Sequence[WorkerReport],
    purpose: str,
    ready: Sequence[AgentReport],
    now: float,
) -> None:
    leaving = list_leaving(term)
    if watch.leave_at is None:
        watch.leave_at = max((w.applied for w in workers), default=0)
        watch.leave_since, watch.leave_saved_at = now, None
        watch.move = planned_moves.build_move(term, purpose, term.recent())
    planned_moves.open_move(term, watch)
    replaced = not term.running.leaving and _replace(term, watch, leaving, ready, now)
    if watch.may_leave_at is None:
        limit = _limit_wait(term, leaving)
        if not (_is_committed(term, watch.leave_at) or now - watch.leave_since >= limit):
            ahead = has_boundary_ahead(term, workers)
            if ahead and _is_save_due(term, watch, watch.leave_at, now):
                watch.leave_saved_at = now
                arm(term, watch, workers, "", now)
            return
        watch.may_leave_at = now
        if not _is_committed(term, watch.leave_at):
            _say_unsaved(term, leaving, limit)
    if replaced and invitations.may_claim_soon(term) and has_boundary_ahead(term, workers):
        arm(term, watch, workers, purpose, now, hold=True)
    elif term.running.leaving != leaving and not (
        _awaits_replacement(term, watch, now)
        or _avoids_a_restart(term, watch, workers, leaving, now)
    ):
        term.line.say("members_leave", slots=",".join(str(slot) for slot, _, _ in leaving))
        term.mark("drain")
        term.change(term.state.let_leave(leaving))


def _limit_wait(term: Term, leaving: Sequence[Id]) -> float:
    """For how many seconds the members wait for the commit of their state: the others hold the same."""
    notices = [r.notice for r in term.recent() if r.id in leaving and r.notice]
    return min([term.settings.drain_seconds, *(max(n / 2, n - LEAVE_SECONDS) for n in notices)])


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
    return inside and now - watch.leave_since < _limit_wait(term, leaving)


def _is_committed(term: Term, step: int) -> bool:
    return term.running.committed >= max(1, step)


def _say_unsaved(term: Term, leaving: Sequence[Id], limit: float) -> None:
    slots = ", ".join(str(slot) for slot, _, _ in leaving)
    text = (
        f"slot {slots} leaves without a checkpoint, because none was committed within {limit:.0f} s "
        "(recovery.drainTimeoutSeconds, and the pod's notice); the others hold the same state and continue"
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
