"""One global step as the training script sees it."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from everstep import rewind
from everstep.errors import Misuse
from everstep.feed import Batches
from everstep.loop import Loop, choose_parameters
from everstep.session import Capture, Session
from everstep_contract.ledger import LedgerEntry


class Step:
    """Given by `job.steps`; valid until the next one."""

    def __init__(self, session: Session, number: int) -> None:
        self.session = session
        self.number = number
        """1, 2, …, until."""
        self.start = rewind.StepStart(session.tracked, session.buffers)
        self.copy: Capture | None = None
        self.reductions = 0
        """Inner loops that have ended."""
        self.marked: tuple[Any, ...] | None = None
        """Fingerprint of the state when the step was marked applied before its end."""
        self._loop: Loop | None = None
        self._loss = math.nan

    @property
    def loss(self) -> float:
        """Σ w·loss / Σ w over the global batch of the last inner loop; NaN if every batch was
        skipped.
        """
        if not self.reductions:
            raise Misuse(
                f"step {self.number}: step.loss is known once the loop over step.batches ends"
            )
        return self._loss

    def batches(
        self,
        data: Batches,
        params: Iterable[torch.nn.Parameter] | None = None,
        *,
        overlap: bool = True,
    ) -> Loop:
        """This rank's micro-batches of the step; `.grad` is the global batch's when the loop has
        ended.

        Each batch needs exactly one `backward` or `skip`. `params`: reduce only these (two
        optimizers: one loop each); gradients of other parameters are dropped. `overlap=False`
        starts the reduction after backward, not under it.

        Raises:
            Misuse: another loop of this step has not ended, or the step was marked applied already.
        """
        if not isinstance(data, Batches):
            raise Misuse(f"step.batches({type(data).__name__}): it takes what job.batches returned")
        self.require_loop_ended()
        if self.marked is not None:
            raise Misuse(
                f"step {self.number}: step.batches after job.evaluate, job.pause or job.sum in "
                "the same step; these mark "
                "the step as applied, so they come after everything that changes the state"
            )
        tracked = self.session.tracked
        named = choose_parameters(tracked.trained_parameters(), tracked.named_parameters(), params)
        self._loop = Loop(self, data, named, overlap)
        return self._loop

    def backward(self, loss: torch.Tensor, weight: Any = None, scaler: Any = None) -> None:
        """Add Σ w·∇loss / Σ w of this batch to the step.

        `loss` is one number, the mean over the batch; `weight` defaults to its number of samples
        (give the number of tokens where samples differ). `scaler` is a `torch.amp.GradScaler`:
        `.grad` is then scaled, the same on all ranks, so `scaler.unscale_`, `scaler.step` and
        `scaler.update` after the loop decide the same everywhere.

        Raises:
            Misuse: outside the loop, twice for one batch, or the loss is not one number.
        """
        self._inside("step.backward").backward(loss, weight, scaler)

    def skip(self) -> None:
        """Leave this batch out: it is in the ledger with weight 0."""
        self._inside("step.skip").skip()

    def require_loop_ended(self) -> None:
        if self._loop is not None and not self._loop.ended:
            raise Misuse(
                f"step {self.number}: the loop over step.batches did not end (break, or an "
                "exception that was swallowed?); a step counts only when every batch of it was "
                "answered: let the loop end, and call step.skip() for a batch to leave out"
            )

    def require_complete(self) -> None:
        self.require_loop_ended()
        if not self.reductions:
            raise Misuse(f"step {self.number}: its body had no loop over step.batches")

    def reduction_ended(self, entry: LedgerEntry, norm: float | None) -> None:
        self.reductions += 1
        self._loss = entry.loss
        findings = self.session.findings
        findings.entries.append(entry)
        findings.loss = None if math.isnan(entry.loss) else entry.loss
        findings.grad_norm = norm

    def _inside(self, what: str) -> Loop:
        if self._loop is None or self._loop.ended:
            raise Misuse(f"step {self.number}: {what} belongs inside the loop over step.batches")
        return self._loop
