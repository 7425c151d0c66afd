"""Checks that may end the job before a step is applied: before its first loop, and after each reduction.

All ranks run the same script and hold the same sums, so all decide the same, and none has to ask another.
"""

import math
from collections.abc import Collection, Mapping, Set
from typing import Any

import torch

from everstep import guards, rewind, undo_step, vector
from everstep.batches import Batches
from everstep.errors import Misuse
from everstep.sharded import local_of
from everstep.step_state import StepState
from everstep_contract.report import Cause


def require_no_gradients(step: StepState, held: Collection[torch.nn.Parameter]) -> None:
    """Raises `Misuse` if the script has computed a gradient that the step's first loop would drop.

    Args:
        held: the parameters that have a gradient. One that is zero, as `zero_grad(set_to_none=False)`
            leaves it, is removed.
    """
    for parameter in held:
        if parameter.grad is not None and not _is_zero(parameter.grad):
            known = step.session.tracked.named_parameters()
            name = next(name for name, one in known.items() if one is parameter)
            raise Misuse(
                f"step {step.number}: {name} has a gradient from a backward() before the loop over step.batches, which "
                "would drop it. Compute that loss within the loop, and call step.backward with the sum of the losses. "
                "If the gradient is to be dropped, call optimizer.zero_grad(), or model.zero_grad(), before the loop"
            )
        parameter.grad = None


def _is_zero(gradient: torch.Tensor) -> bool:
    own = local_of(gradient)
    return own.layout == torch.strided and not bool(own.any())


def require_finite(step: StepState, feed: Batches, summary: vector.Summary) -> None:
    """End the job if a loss is NaN or infinite. The state before the step is saved
    first, unless that is broken, too.
    """
    index = vector.find_not_finite(summary)
    if index is None:
        return
    places = feed.places(index)
    samples = list(summary.samples[places.start : places.stop])
    bad = step.session.tracked.find_not_finite()
    if not bad:
        undo_step.save_before(step)
    why = f"; the parameter {bad} was not finite before it: that state is not saved" if bad else ""
    step.session.fail(
        Cause.NOT_FINITE,
        f"step {step.number}: the loss of micro-batch {index} is {summary.losses[index]}; its "
        f"samples are {samples}. {_describe_applied(step)}{why}",
    )


def _describe_applied(step: StepState) -> str:
    if not undo_step.is_lost(step):
        return "Nothing of this step was applied"
    return (
        "An earlier loop of this step was applied, and there is no copy of the state before the step: a run keeps one "
        "only after its first step with several loops. The newest checkpoint is what remains"
    )


def require_same_counts(step: StepState, before: Mapping[str, Any]) -> None:
    """Raises `Misuse` if a schedule has stepped since the inner loop began. `before`: how often each had."""
    now = rewind.list_counts(step.session.tracked)
    if stepped := [name for name in now if now[name] != before.get(name)]:
        raise Misuse(
            f"step {step.number}: {stepped[0]}.step() was called within the loop over step.batches. A rank calls it "
            "there once for each of its batches, so the learning rate would depend on the number of ranks. Call it "
            "after the loop, once for each step"
        )


def require_still_frozen(step: StepState, asked: Set[int] | None, dropped: Set[int]) -> None:
    """Raises `Misuse` if the inner loop has dropped the gradient of a parameter that was frozen when it began, and that
    it would have summed otherwise.

    Args:
        asked: as for `Loop`.
        dropped: ids of parameters whose gradients the loop has dropped.
    """
    if not dropped:
        return
    tracked = step.session.tracked
    known = tracked.held_parameters() if asked is None else tracked.named_parameters().items()
    chosen = dropped if asked is None else dropped & asked
    if name := next((n for n, p in known if id(p) in chosen), ""):
        raise Misuse(
            f"step {step.number}: {name} was frozen when the loop over step.batches began, and was unfrozen within it, "
            "so the gradient of the global batch lacks it. Freeze and unfreeze parameters between two loops: call "
            "requires_grad_(step.number >= N), for example, before the loop"
        )


def watch_jumps(step: StepState, summary: vector.Summary, norm: float | None) -> None:
    """Note a loss or gradient norm that is out of proportion, or stop, as the job's guard says."""
    session = step.session
    for what, value in {"loss": summary.loss, "gradient norm": norm}.items():
        if value is None or (what == "loss" and math.isnan(value)):
            continue
        key = f"{step.reductions}/{what}"
        before = session.windows.get(key, ())
        jump = guards.find_jump(
            what, value, before, factor=session.start.guard_factor, step=step.number
        )
        if jump and session.start.guard_action == "SaveAndStop":
            undo_step.save_before(step)
            session.fail(Cause.GUARD, f"{jump}; stopped before it was applied")
        if jump:
            session.note(jump)
        finite = math.isfinite(value)
        session.windows[key] = guards.extend(before, value) if finite else before
