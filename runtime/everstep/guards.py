"""When a loss or a gradient is out of all proportion.

Pure; the same numbers on every rank give the same verdict.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

WINDOW = 100
"""Steps that the rolling mean covers."""
NEEDED = 10
"""Steps before the mean means anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    reason: str
    message: str


def judge(
    what: str, value: float, window: Iterable[float], *, factor: float, step: int
) -> Verdict | None:
    """None if `value` is within `factor` × the mean of what came before (a factor ≤ 0 switches the
    guard off).
    """
    before = list(window)
    if factor <= 0 or len(before) < NEEDED:
        return None
    mean = math.fsum(before) / len(before)
    if math.isfinite(value) and (mean <= 0 or value <= factor * mean):
        return None
    return Verdict(
        reason="GuardTripped",
        message=f"step {step}: {what} {value:.4g} is more than {factor:g} × its mean {mean:.4g} "
        f"over the last {len(before)} steps",
    )


def extended(window: Iterable[float], value: float) -> tuple[float, ...]:
    """The window after a step that was in order."""
    return (*window, value)[-WINDOW:]
