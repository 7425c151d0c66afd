"""Detects an optimizer that trains tracked parameters and is not tracked itself, or that steps too early, a
model and its optimizer that are both not tracked, and a schedule or a scaler that is not tracked.

Everstep hands gradients only to parameters that tracked optimizers hold, and saves only what is
tracked. So an optimizer that is not tracked trains nothing, or loses its state whenever a rank joins
or restarts. And there are no gradients before the end of the inner loop, so a step within it, as
scripts that accumulate gradients have it, changes nothing. If a hook of the script runs it in backward,
it applies the gradient of one micro-batch, and each rank that of another.
"""

import functools
import sys
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from everstep.errors import Misuse
from everstep.rewind import join_names
from everstep.tracked import Tracked

if TYPE_CHECKING:
    from everstep.session import Session

_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()
_noted: "weakref.WeakSet[Session]" = weakref.WeakSet()
"""Those that have noted an optimizer of which they know neither the state nor a parameter."""


def watch(session: "Session") -> None:
    """From now on, check each optimizer that ends its step within an inner loop of a step of this
    session, or between it and the moment at which that step counts as applied.
    """
    _sessions.add(session)
    _register()


@functools.cache
def _register() -> None:
    """Once for the process: torch calls the hook for every optimizer, after its step."""
    register_optimizer_step_post_hook(_check)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for session in list(_sessions):
        step = session.step
        if step is None or step.mark is not None:
            continue
        if step.loop is not None and step.loop.begun and not step.loop.ended:
            problem = find_early(session.tracked, optimizer)
        else:
            problem = ""
            if step.reductions:
                problem = find_problem(session.tracked, optimizer)
                problem = problem or find_scaler_problem(session.tracked, optimizer)
        if problem:
            raise Misuse(f"step {step.number}: {problem}")
        if session not in _noted and (told := describe_apart(session, optimizer)):
            _noted.add(session)
            session.note(told)


def describe_schedule(tracked: Tracked) -> str:
    """Describe that a learning-rate schedule of torch was made for a tracked optimizer, and none of the
    tracked objects may hold its state; empty: that is not so.
    """
    scalers = (torch.amp.GradScaler,)
    if any(not isinstance(thing, scalers) for _, thing in tracked.of_kind("object")):
        return ""
    for name, optimizer in tracked.of_kind("optimizer"):
        if hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched"):  # torch marks it
            return (
                f"a learning-rate schedule was made for {name}, and none is tracked: a rank that joins or restarts "
                "would begin it again. Name it in job.track(schedule=…)"
            )
    return ""


def describe_apart(session: "Session", optimizer: torch.optim.Optimizer) -> str:
    """Describe that an optimizer which has just made a step, and all that it trains, are tracked nowhere; empty:
    that is not so.
    """
    tracked = session.tracked
    if _is_tracked(tracked, optimizer):
        return ""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    known = set(map(id, tracked.named_parameters().values()))
    if not trained or known.intersection(map(id, trained)) or session.local.may_hold(trained):
        return ""
    return (
        f"{type(optimizer).__name__}.step() trains parameters that no tracked module has: their gradients are not "
        "summed, so each rank trains other values, and a checkpoint lacks them unless a tracked object holds them. "
        "Name this optimizer and its model in job.track(…), or in job.track_local(…) if each rank is to train its own"
    )


def find_early(tracked: Tracked, optimizer: torch.optim.Optimizer) -> str:
    """Describe what an optimizer that has just made a step within an inner loop fails to do; empty: nothing."""
    known = set(map(id, tracked.named_parameters().values()))
    held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in known]
    if not held:
        return ""
    why = "has no gradient to apply: .grad is None until the loop has ended"
    if any(p.grad is not None for p in held):
        why = "applies what this rank alone has computed, perhaps in a hook of the script that runs in backward"
    return (
        f"{type(optimizer).__name__}.step() within the loop over step.batches, or after a break out of it, {why}. Call "
        "the optimizer's step, and a schedule's, after the loop, once for each step. To leave out a batch, call "
        "step.skip() instead of break; to accumulate gradients over more batches, raise global_batch"
    )


def find_problem(tracked: Tracked, optimizer: torch.optim.Optimizer) -> str:
    """Describe what an optimizer that has just made a step fails to do because it is not tracked;
    empty: nothing.
    """
    if _is_tracked(tracked, optimizer):
        return ""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    own = {name: p for name, p in tracked.named_parameters().items() if id(p) in held}
    trained = tracked.trained_parameters() if own else {}
    idle = [n for n, p in own.items() if p.requires_grad and n not in trained and p.grad is None]
    who = f"this {type(optimizer).__name__} is not tracked"
    fix = "name it in job.track(optimizer=…), as every optimizer"
    if idle:
        names = join_names(idle)
        return f"{who}, and no tracked one holds {names}, so it has no gradient to apply: {fix}"
    if own and optimizer.state and not tracked.may_hold_optimizers():
        return f"{who}, so a rank that joins or restarts would begin without its state: {fix}"
    return ""


def find_scaler_problem(tracked: Tracked, optimizer: torch.optim.Optimizer) -> str:
    """Describe that a GradScaler which makes this step of a tracked optimizer is not tracked; empty: that is not so.
    It may have scaled the losses itself, as in `step.backward(scaler.scale(loss))`.
    """
    scaler = _find_scaler() if _is_tracked(tracked, optimizer) else None
    known = [thing for _, thing in tracked.of_kind("object")]
    if scaler is None or any(thing is scaler for thing in known) or tracked.may_hold_optimizers():
        return ""
    return (
        "a GradScaler makes the optimizer's step, and it is not tracked. A rank that joins or restarts would begin "
        "with another scale, and the sums would mix both: call job.track(scaler=scaler), and "
        "step.backward(loss, scaler=scaler) with the loss as it is"
    )


def _find_scaler() -> torch.amp.GradScaler | None:
    """The enabled scaler in whose step this is called. torch passes it to no hook."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    found: torch.amp.GradScaler | None = frame.f_locals["self"] if frame is not None else None
    return found if found is not None and found.is_enabled() else None


def _is_tracked(tracked: Tracked, optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer is tracked, or one that wraps it and shares its state."""
    known = (thing for _, thing in tracked.of_kind("optimizer"))
    return any(getattr(thing, "state", None) is optimizer.state for thing in known)
