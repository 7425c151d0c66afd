"""One global step, as the training script sees it."""

from collections.abc import Iterable
from typing import Any

import torch

from everstep.batches import Batches
from everstep.errors import Misuse
from everstep.loop import Loop, choose_parameters
from everstep.step_state import StepState


class Step:
    """One step, yielded by `job.steps`; valid until the next one."""

    def __init__(self, state: StepState) -> None:
        self._state = state

    @property
    def number(self) -> int:
        """1, 2, …, until."""
        return self._state.number

    @property
    def loss(self) -> float:
        """Σ w·loss / Σ w over the global batch of the last inner loop;
        NaN if every batch was skipped.

        Raises:
            Misuse: no inner loop of the step has ended yet.
        """
        if not self._state.reductions:
            raise Misuse(
                f"step {self.number}: step.loss is known once the loop over step.batches ends"
            )
        return self._state.loss

    def batches(
        self,
        data: Batches,
        params: Iterable[torch.nn.Parameter] | None = None,
        *,
        overlap: bool = True,
    ) -> Loop:
        """Iterate over this rank's micro-batches of the step. When the loop has ended, `.grad` is
        the gradient of the global batch.

        Each batch needs exactly one `backward` or `skip`.

        Args:
            data: a feed that was made before `job.steps`.
            params: reduce only these parameters and drop the gradients of others (with two
                optimizers, write one loop for each). Pass a list: a generator is empty after its
                first use. None: all parameters that the tracked optimizers hold.
            overlap: False: the reduction starts after the last backward instead of during it.

        Raises:
            Misuse: another loop of this step has not ended, the step is already marked as applied,
                no parameter in `params` requires a gradient, the script has computed a gradient
                before the loop, or unfreezes a parameter within it.
        """
        if not isinstance(data, Batches):
            raise Misuse(f"step.batches({type(data).__name__}): it takes what job.batches returned")
        self._state.require_loop_ended()
        if self._state.mark is not None:
            raise Misuse(
                f"step {self.number}: step.batches after job.evaluate, job.pause or job.sum in "
                "the same step; these mark the step as applied, so they come after everything "
                "that changes the state"
            )
        tracked = self._state.session.tracked
        asked = None if params is None else {id(p) for p in params}
        named = choose_parameters(tracked.trained_parameters(), tracked.named_parameters(), asked)
        loop = Loop(self._state, data, named, asked, overlap)
        self._state.loop = loop
        return loop

    def backward(self, loss: torch.Tensor, weight: Any = None, scaler: Any = None) -> None:
        """Add this batch to the step's gradient Σ w·∇loss / Σ w.

        Args:
            loss: one number, the mean over the batch.
            weight: a number. None: the number of samples in the batch. Pass the number of tokens if
                samples differ in length.
            scaler: a tracked `torch.amp.GradScaler`, instead of `scaler.scale(loss)`, which would
                scale `step.loss`, too. `.grad` is then scaled in the same way on all ranks,
                so `scaler.unscale_`, `scaler.step` and `scaler.update` after the loop decide the
                same on every rank.

        Raises:
            Misuse: called outside the loop or twice for one batch, or the loss is not one number.
        """
        self._loop("step.backward").backward(loss, weight, scaler)

    def skip(self) -> None:
        """Leave this batch out; the ledger records it with weight 0.

        Raises:
            Misuse: called outside the loop, the batch already had its `backward` or `skip`, or
                several ranks form a unit.
        """
        self._loop("step.skip").skip()

    def _loop(self, what: str) -> Loop:
        loop = self._state.loop
        if not isinstance(loop, Loop) or loop.ended:
            raise Misuse(f"step {self.number}: {what} belongs inside the loop over step.batches")
        return loop
