"""The input of a rule for one GPU and page, and its result."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

Values = Mapping[str, Mapping[int, float]]
"""Metric → code → value. The code is the number in the metric's label, 0 without a label. A series
that the page lacks is absent.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    now: Values
    """The rule's own metrics, of one GPU, on the newest page."""
    before: Values
    """`Change.kept` of the page before; empty for the first page that shows the GPU, and after a reboot."""
    standing: Collection[int]
    """Codes that have risen and not ended."""
    live: bool = True
    """Whether the exporter can read the GPU: the page has its energy, or no page ever had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    risen: Collection[int] = ()
    """Codes on this page that were not on the one before. On the first page: all present codes."""
    ended: Collection[int] = ()
    """Those of the standing codes that the exporter has cleared."""
    kept: Values = field(default_factory=dict)
    """For the next page."""
