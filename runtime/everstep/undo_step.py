"""Going back to the boundary before a step that cannot be applied.

Until the first reduction of a step is applied, a step changes only what `rewind.StepStart` puts
back. A step with several loops applies the first before the second is reduced, so a copy of the
state before the step is kept on the host, from the second step of a life on. In the first step no
copy is needed: the state before it is what the life resumed from, which is committed.
"""

from typing import NoReturn

from everstep.snapshot import Capture
from everstep.step_state import StepState
from everstep_contract import wire


def keep_copy(step: StepState) -> None:
    """Keep the state before the step: a later reduction may fail when the first is applied."""
    if step.start.untouched():
        with step.start.as_it_was():
            step.copy = step.session.capture().cloned()


def save_before(step: StepState) -> None:
    """Stage the state before the step; every rank decides alike."""
    session, before = step.session, step.number - 1
    session.end_copy()
    sound, capture = _rewind(step)
    if sound and before > max(session.staged, session.start.applied):
        session.stage(before, capture)


def save_held(step: StepState, asked: wire.SaveHeld) -> None:
    """Stage the whole state before the step, in which this rank is held; the step goes on from where it is.

    The save is of the epoch that asked for it: once the next one has begun it counts no more.
    """
    session = step.session
    if asked.step != step.number - 1:
        return
    session.end_copy()
    if step.copy is not None:
        session.stage_held(asked, step.copy)
    elif not step.reductions and step.start.untouched():
        with step.start.as_it_was():
            session.stage_held(asked, session.capture())


def leave(step: StepState, why: str) -> NoReturn:
    """Park at the boundary before the step."""
    step.session.reducer.abandon()
    sound, capture = _rewind(step)
    why = f"step {step.number}: {why}"
    step.session.park(step.number - 1, sound=sound, capture=capture, why=why)


def _rewind(step: StepState) -> tuple[bool, Capture | None]:
    """Make the state that of the boundary before the step, or give the copy of it; False: the
    state has moved on and there is no copy.
    """
    if step.copy is not None:
        return True, step.copy
    if step.reductions or not step.start.untouched():
        return False, None
    step.start.put_back()
    return True, None
