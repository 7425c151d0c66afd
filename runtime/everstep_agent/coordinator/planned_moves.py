"""A planned end of the epoch: recorded when its boundary is armed, later opened as an incident or withdrawn."""

from everstep_agent.coordinator import boundaries
from everstep_agent.coordinator.incidents import Cause
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.watch import Move, Watch
from everstep_agent.peers.agent_report import AgentReport
from everstep_contract import levels, names


def build_move(term: Term, purpose: str, recent: list[AgentReport]) -> Move | None:
    if purpose not in levels.IN_ORDER:
        return None
    told = boundaries.list_terminating(term.running.members, recent, coordinator=term.me.id)
    leaves = purpose not in ("Grow", "Edit")
    inside = {term.me.slot, *(m.slot for m in term.running.members)}
    asked = inside & {*term.wanted.leave}  # spares that leave interrupt nothing
    slots = tuple(sorted({*told, *asked})) if leaves else ()
    # The operator derives the same id when it sees the pod being deleted, so both report one
    # incident.
    by_signal = leaves and told and not asked
    reason = term.wanted.leave_reason if asked else "its agent received SIGTERM"
    message = boundaries.describe_purpose(purpose, slots, reason)
    return Move(
        cause=Cause(name=purpose, message=message, slots=slots),
        id=names.incident_id("PodDeleted", slots[0], told[slots[0]]) if by_signal else "",
    )


def open_move(term: Term, watch: Watch) -> None:
    """Open the planned end as an incident, once the recovery during which it was armed is over."""
    move = watch.move
    if move is None or term.state.incidents.current is not None:
        return
    term.open_incident(move.cause, id=move.id)
    term.change(term.state.name_incident())
    watch.move = None


def withdraw_move(term: Term, purpose: str) -> None:
    """Close the incident of a planned end that is no longer wanted and that has not begun.

    Args:
        purpose: what is wanted now.
    """
    incidents = term.state.incidents
    level = incidents.current.level if incidents.current is not None else None
    if level is None or level.cause not in levels.IN_ORDER - {purpose} or level.phases:
        return
    withdrawn = Cause(name=level.cause, message="it was withdrawn before anybody stopped for it")
    term.line.say("move_withdrawn", incident=level.id, cause=level.cause)
    closed = incidents.explain(withdrawn, since=None).close()
    term.change(term.state.with_incidents(closed).name_incident())
