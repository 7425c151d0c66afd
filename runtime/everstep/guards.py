"""When a loss or a gradient norm is out of proportion. Pure, so all ranks decide the same."""

import math
from collections.abc import Iterable

WINDOW = 100
"""Steps that the rolling mean covers."""
NEEDED = 10
"""With fewer steps the mean has no meaning."""


def find_jump(what: str, value: float, window: Iterable[float], *, factor: float, step: int) -> str:
    """Return a sentence if `value` is more than `factor` x the mean of `window`. Empty: it is not,
    the guard is off (a factor of 0 or less), or the window is too short.
    """
    before = list(window)
    if factor <= 0 or len(before) < NEEDED:
        return ""
    mean = math.fsum(before) / len(before)
    if math.isfinite(value) and (mean <= 0 or value <= factor * mean):
        return ""
    return (
        f"step {step}: {what} {value:.4g} is more than {factor:g} × its mean {mean:.4g} "
        f"over the last {len(before)} steps"
    )


def extend(window: Iterable[float], value: float) -> tuple[float, ...]:
    """The window after one more step."""
    return (*window, value)[-WINDOW:]
