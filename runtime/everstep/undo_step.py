"""Going back to the boundary before a step that cannot be applied.

Until the first reduction of a step is applied, a step changes only what `rewind.StepStart` can
restore. A step with several loops applies the first reduction before the second is complete. So
once a step of the run had several loops, a copy of the state before each later step is kept on the
host. Checkpoints, and the state that a newcomer takes, hold that number of loops. Only the first
step of the run that has several loops is without a copy: a loss in its second loop costs the steps
since the newest checkpoint.
"""

from typing import NoReturn

from everstep.rewind import join_names
from everstep.snapshot import Capture
from everstep.step_state import StepState
from everstep_contract import wire


def keep_copy(step: StepState) -> None:
    """Keep the state before the step: a later reduction may fail after the first is applied."""
    if step.start.untouched():
        with step.start.as_it_was():
            step.copy = step.session.capture().cloned()


def is_lost(step: StepState) -> bool:
    """Whether the state before the step is lost: a reduction was applied, and there is no copy."""
    return step.reductions > 0 and step.copy is None


def save_before(step: StepState) -> None:
    """Stage the state before the step; every rank decides the same."""
    session, before = step.session, step.number - 1
    session.saves.end_copy()
    sound, capture, _ = _rewind(step)
    if sound and before > max(session.saves.staged, session.start.applied):
        session.saves.stage(before, capture)


def save_held(step: StepState, asked: wire.SaveHeld) -> None:
    """Stage the full state before the step in which this rank is held; the step
    then continues from where it is.

    The save belongs to the epoch that asked for it. Once the next epoch
    has begun, it no longer counts.
    """
    session = step.session
    if asked.step != step.number - 1:
        return
    session.saves.end_copy()
    if step.copy is not None:
        session.saves.stage_held(asked, step.copy)
    elif not step.reductions and step.start.untouched():
        with step.start.as_it_was():
            session.saves.stage_held(asked, session.capture())


def leave(step: StepState, why: str) -> NoReturn:
    """Park at the boundary before the step."""
    step.session.reducer.abandon()
    sound, capture, changed = _rewind(step)
    why = f"step {step.number}: {why}"
    if changed:
        why += f"; {join_names(changed)} was changed before the step was applied, so the step cannot be undone"
    step.session.park(step.number - 1, sound=sound, capture=capture, why=why)


def _rewind(step: StepState) -> tuple[bool, Capture | None, set[str]]:
    """Go back to the state at the boundary before the step, or return the copy of it. False: the
    state has moved on and there is no copy, perhaps because of the objects that are named.
    """
    if step.copy is not None:
        return True, step.copy, set()
    if is_lost(step):
        return False, None, set()
    if changed := step.start.list_changed():
        return False, None, changed
    step.start.put_back()
    return True, None, set()
