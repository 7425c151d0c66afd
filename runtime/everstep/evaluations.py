"""What evaluations leave as it was: the mode of autograd, the random states, and the buffers that
forward changes: each rank evaluates other batches, so its buffers would differ from those of others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from everstep import randomness
from everstep.buffers import Buffers
from everstep.errors import Misuse

CHANGED = (
    "job.evaluate: forward changes the buffer {name}. Is the model in train mode? Call model.eval() before. The "
    "buffers are put back as they were, because each rank evaluates other batches"
)

CHANGED_LARGE = (
    "job.evaluate: forward changed the buffer {what}, which is too large to be put back. Each rank evaluates other "
    "batches, so the ranks would not hold the same state any more. Register it with persistent=False if a checkpoint "
    "need not hold it, as a cache. Or is the model in train mode? Call model.eval() before"
)


class Evaluations:
    """Evaluations may overlap, as in `zip(job.evaluate(a), job.evaluate(b))`, and then end in any
    order.

    Args:
        note: adds a sentence to the job's status.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._open: list[object] = []
        self._note, self._noted = note, False
        self._changed_large = ""

    @contextmanager
    def begin(self, buffers: Buffers) -> Iterator[None]:
        """Compute without gradients. When the last evaluation ends, all is as it was before the
        first one.
        """
        if not self._open:
            self._gradients, self._random = torch.is_grad_enabled(), randomness.capture()
            self._buffers, self._held, self._large = buffers, buffers.hold(), buffers.mark_large()
        self._open.append(own := object())
        torch.set_grad_enabled(False)
        try:
            yield
        finally:
            if own in self._open:
                self._open.remove(own)
                self._restore()

    def end_all(self) -> None:
        """End those that the script has begun and not ended. Raises `Misuse` if one has changed a buffer that
        is too large to be put back.
        """
        if self._open:
            self._open.clear()
            self._restore()
        if self._changed_large:
            raise Misuse(CHANGED_LARGE.format(what=self._changed_large))

    def _restore(self) -> None:
        if not self._open:
            # Else the script's own `no_grad` was around it, and may have ended since.
            if self._gradients:
                torch.set_grad_enabled(True)
            randomness.restore(self._random)
            self._changed_large = self._changed_large or self._buffers.find_changed_large(
                self._large
            )
            if changed := self._buffers.find_changed(self._held):
                self._buffers.put_back(self._held)
                if not self._noted:
                    self._note(CHANGED.format(name=changed))
                self._noted = True
