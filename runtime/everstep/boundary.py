"""Between two steps: the only place where checkpoints are taken, and where members join and
leave.
"""

from dataclasses import replace

from everstep import joining, rewind
from everstep.errors import Misuse
from everstep.session import Findings, Session
from everstep.step_state import StepState
from everstep_contract import wire
from everstep_contract.position import Phase


def mark_applied(session: Session, step: StepState, *, at_once: bool = False) -> None:
    """Mark the step as applied, and report to the agent what it was made of; once for each step.

    Args:
        at_once: send the report now, because something slow may follow.
    """
    if step.mark is not None:
        return
    step.require_complete()
    if told := step.describe_unapplied():
        session.note(told)
    step.mark = rewind.fingerprint(session.tracked)
    step.copy = None
    session.most_reductions = max(session.most_reductions, step.reductions)
    session.applied = step.number
    epoch = session.membership.mark_applied(step.number)
    session.feeds.count_draws()
    session.meter.update(epoch=epoch, applied=step.number, phase=Phase.APPLIED, reduction=0)
    found, session.findings = session.findings, Findings()
    ends_recovery = epoch != session.told_epoch
    session.told_epoch = epoch
    now = at_once or ends_recovery or bool(found.notes or found.own_notes)
    (session.agent.send if now else session.agent.send_soon)(
        wire.Applied(
            epoch=epoch,
            step=step.number,
            loss=found.loss,
            grad_norm=found.grad_norm,
            entries=tuple(
                e if e.epoch == epoch else replace(e, epoch=epoch) for e in found.entries
            ),
            notes=tuple(found.notes),
            own_notes=tuple(found.own_notes),
        )
    )


def cross(session: Session, step: StepState) -> None:
    """Cross the boundary after a step's body has ended: count the step, save if a save is due, let
    newcomers join, park if asked to stay.

    Raises:
        Misuse: the state changed after the step was marked as applied.
    """
    if step.mark is not None and rewind.fingerprint(session.tracked) != step.mark:
        raise Misuse(
            f"step {step.number}: parameters, a learning rate or a schedule changed after job.evaluate, job.pause or "
            "job.sum; these mark the step as applied, so they come after everything that changes the state. To "
            "evaluate averaged weights, use a copy of the model. A schedule that needs the result (ReduceLROnPlateau) "
            "steps before the loop of the next step, and a learning rate is set there; keep the result in a tracked "
            "object until then. On a GPU, flatten_parameters() of an LSTM or GRU moves its parameters: leave it out of "
            "forward, because .to(job.device) has called it"
        )
    mark_applied(session, step)
    if session.broken:
        session.park(session.applied, why="the epoch ended")
    reply = _ask(session)
    due = session.saves.asked.step == step.number or _due(session, step.number)
    if session.saves.staged != step.number and (reply.save or due):
        if reply.stay or step.number == session.until:
            session.saves.stage_surely(step.number)
        else:
            session.saves.stage_beside(step.number, near=reply.near and not due)
    elif step.number != session.until:
        session.saves.prepare_grown()
    if reply.hold:
        joining.let_join(session, reply.epoch)
        if session.broken:
            session.park(session.applied, why="the epoch ended")
    if reply.stay:
        session.park(session.applied, why="asked to stay at this boundary")


def _ask(session: Session) -> wire.BoundaryReply:
    """Ask the agent what to do here; only at the boundary that it has armed,
    because at others it wants nothing.
    """
    if session.meter.armed != session.applied:
        return wire.BoundaryReply()
    with session.meter.charging("wait", waiting=True):
        reply: wire.BoundaryReply = session.agent.request(
            wire.AtBoundary(epoch=session.epoch, step=session.applied)
        )
    return reply


def _due(session: Session, step: int) -> bool:
    every = session.start.save_every_steps
    return step == session.until or (every > 0 and step % every == 0)
