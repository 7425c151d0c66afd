"""What evaluations leave as it was: the mode of autograd, and the random states."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from everstep import randomness


class Evaluations:
    """Evaluations may overlap, as in `zip(job.evaluate(a), job.evaluate(b))`, and then end in any
    order.
    """

    def __init__(self) -> None:
        self._open: list[object] = []

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Compute without gradients. When the last evaluation ends, all is as it was before the
        first one.
        """
        if not self._open:
            self._gradients, self._random = torch.is_grad_enabled(), randomness.capture()
        self._open.append(own := object())
        torch.set_grad_enabled(False)
        try:
            yield
        finally:
            if own in self._open:
                self._open.remove(own)
                self._restore()

    def end_all(self) -> None:
        """End those that the script has begun and not ended."""
        if self._open:
            self._open.clear()
            self._restore()

    def _restore(self) -> None:
        if not self._open:
            torch.set_grad_enabled(self._gradients)
            randomness.restore(self._random)
