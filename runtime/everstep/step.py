"""One global step, as the training script sees it."""

from collections.abc import Iterable
from typing import Any

import torch

from everstep.batches import Batches
from everstep.errors import Misuse
from everstep.loop import Loop, choose_parameters
from everstep.step_state import StepState


class Step:
    """Given by `job.steps`; valid until the next one."""

    def __init__(self, state: StepState) -> None:
        self._state = state

    @property
    def number(self) -> int:
        """1, 2, …, until."""
        return self._state.number

    @property
    def loss(self) -> float:
        """Σ w·loss / Σ w over the global batch of the last inner loop; NaN if every batch was
        skipped.

        Raises:
            Misuse: no inner loop of the step has ended.
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
        """This rank's micro-batches of the step; when the loop has ended, `.grad` is that of the
        global batch.

        Each batch needs exactly one `backward` or `skip`.

        Args:
            data: a feed that was made before `job.steps`.
            params: reduce only these (two optimizers: one loop each); gradients of other parameters
                are dropped. None: all that the tracked optimizers hold.
            overlap: False: the reduction starts after the last backward, not under it.

        Raises:
            Misuse: another loop of this step has not ended, or the step was marked applied already.
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
        named = choose_parameters(tracked.trained_parameters(), tracked.named_parameters(), params)
        loop = Loop(self._state, data, named, overlap)
        self._state.loop = loop
        return loop

    def backward(self, loss: torch.Tensor, weight: Any = None, scaler: Any = None) -> None:
        """Add this batch to the step's gradient Σ w·∇loss / Σ w.

        Args:
            loss: one number, the mean over the batch.
            weight: a number; None: the samples of the batch. Give the number of tokens where
                samples differ.
            scaler: a `torch.amp.GradScaler`. `.grad` is then scaled, alike on all ranks, so
                `scaler.unscale_`, `scaler.step` and `scaler.update` after the loop decide alike.

        Raises:
            Misuse: outside the loop, twice for one batch, or the loss is not one number.
        """
        self._loop("step.backward").backward(loss, weight, scaler)

    def skip(self) -> None:
        """Leave this batch out; the ledger has it with weight 0.

        Raises:
            Misuse: outside the loop, or the batch has had its `backward` or `skip`.
        """
        self._loop("step.skip").skip()

    def _loop(self, what: str) -> Loop:
        loop = self._state.loop
        if not isinstance(loop, Loop) or loop.ended:
            raise Misuse(f"step {self.number}: {what} belongs inside the loop over step.batches")
        return loop
