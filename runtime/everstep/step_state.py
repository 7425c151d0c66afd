"""How far one global step has come."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from everstep import rewind
from everstep.errors import Misuse
from everstep.session import Session
from everstep.snapshot import Capture
from everstep_contract.ledger import LedgerEntry


class InnerLoop(Protocol):
    ended: bool

    @property
    def begun(self) -> bool: ...


class StepState:
    """What the inner loops and the boundary share about a step; the script sees `step.Step`."""

    def __init__(self, session: Session, number: int) -> None:
        self.session = session
        self.number = number
        first = number == session.start.applied + 1
        self.start = rewind.StepStart(session.tracked, session.buffers, thorough=first)
        self.loop: InnerLoop | None = None
        """The newest inner loop."""
        self.reductions = 0
        """Inner loops that have ended."""
        self.loss = math.nan
        """Loss of the last inner loop."""
        self.scaled = False
        """A scaler made the last inner loop's gradients, so it may leave out the optimizer's step."""
        self.copy: Capture | None = None
        """The state before the step; kept only if a step has several loops."""
        self.mark: tuple[Any, ...] | None = None
        """Fingerprint of the state when the step was marked as applied; None: it is not marked
        yet.
        """

    def require_loop_ended(self) -> None:
        """Raises `Misuse`."""
        if self.loop is not None and not self.loop.ended:
            raise Misuse(
                f"step {self.number}: the loop over step.batches did not end (break, an exception that was "
                "swallowed, zip() of two loops, len() of one that is not used, or job.evaluate, job.pause or job.sum "
                "within it?); a step counts only when every batch of it was answered: let the loop end, and call "
                "step.skip() for a batch to leave out. Add up in the loop, and call job.sum after it. To use samples "
                "of two datasets in one loss, make one dataset of both"
            )

    def require_used(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Raises `Misuse` if a loop over `parameters` would drop a gradient that nothing has used."""
        if not self.reductions or self.scaled:
            return
        changed = self.start.list_changed()
        unused = [n for n, p in parameters.items() if p.grad is not None and n not in changed]
        if unused:
            raise Misuse(
                f"step {self.number}: another loop over step.batches would drop the gradient of {unused[0]} that the "
                "one before it has delivered, and no optimizer has applied it. To train with both, add the losses in "
                "one loop, or call optimizer.step() after each. To drop it on purpose, call optimizer.zero_grad() "
                "between the loops"
            )

    def describe_unapplied(self) -> str:
        """Say that nothing has applied the gradients of this step, if it is the first one of this process;
        empty: something has, or may have.
        """
        if self.scaled or not self.start.is_unused():
            return ""
        tracked = self.session.tracked
        has_gradients = any(p.grad is not None for p in tracked.trained_parameters().values())
        if not has_gradients or not any(tracked.of_kind("optimizer")):
            return ""
        return (
            f"step {self.number}: no optimizer has applied its gradients, and the next step drops them. To accumulate "
            "gradients over more batches, raise global_batch: .grad is that of the whole global batch"
        )

    def require_complete(self) -> None:
        """Raises `Misuse`."""
        self.require_loop_ended()
        if not self.reductions:
            raise Misuse(
                f"step {self.number}: there was no loop over step.batches before its end, or before job.evaluate, "
                "job.pause or job.sum, which mark the step as applied. Put the loop first"
            )

    def end_reduction(self, entry: LedgerEntry, norm: float | None, *, scaled: bool) -> None:
        self.reductions += 1
        self.scaled = scaled
        self.loss = entry.loss
        findings = self.session.findings
        findings.entries.append(entry)
        findings.loss = None if math.isnan(entry.loss) else entry.loss
        findings.grad_norm = norm
