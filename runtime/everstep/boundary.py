"""Between two steps: the only place where a checkpoint is taken and where members come and go."""

from everstep import rewind
from everstep.errors import Misuse
from everstep.session import Findings, Session
from everstep.step import Step
from everstep_contract import wire
from everstep_contract.position import Phase


def mark_applied(session: Session, step: Step) -> None:
    """From here on the step counts; tell the agent what it was made of."""
    if step.marked is not None:
        return
    step.require_complete()
    step.marked = rewind.fingerprint(session.tracked)
    step.copy = None
    session.most_reductions = max(session.most_reductions, step.reductions)
    session.applied = step.number
    session.meter.update(applied=step.number, phase=Phase.APPLIED, reduction=0)
    found, session.findings = session.findings, Findings()
    session.link.send(
        wire.Applied(
            epoch=session.start.epoch,
            step=step.number,
            loss=found.loss,
            grad_norm=found.grad_norm,
            entries=tuple(found.entries),
            notes=tuple(found.notes),
        )
    )


def cross(session: Session, step: Step) -> None:
    """The step's body has ended: count it, save and stay if that is due."""
    if step.marked is not None and rewind.fingerprint(session.tracked) != step.marked:
        raise Misuse(
            f"step {step.number}: parameters or a schedule changed after job.evaluate, job.pause "
            "or job.sum; these mark "
            "the step as applied, so they come after everything that changes the state"
        )
    mark_applied(session, step)
    if session.broken:
        session.park(session.applied, why="the epoch ended")
    reply = _ask(session)
    if session.staged != step.number and (reply.save or _due(session, step.number)):
        if reply.stay or step.number == session.until:
            session.stage_surely(step.number)
        else:
            session.stage(step.number)
    if reply.stay:
        session.park(session.applied, why="asked to stay at this boundary")


def _ask(session: Session) -> wire.BoundaryReply:
    if session.meter.armed != session.applied:
        return wire.BoundaryReply()
    with session.meter.charging("wait", waiting=True):
        reply: wire.BoundaryReply = session.link.request(
            wire.AtBoundary(epoch=session.start.epoch, step=session.applied)
        )
    return reply


def _due(session: Session, step: int) -> bool:
    every = session.start.save_every_steps
    return step == session.until or (every > 0 and step % every == 0)
