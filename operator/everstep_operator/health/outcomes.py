"""The result of a scrape: a page, or a failure as a value."""

import enum
from dataclasses import dataclass

from everstep_operator.health.parse import Page


class FailureKind(enum.Enum):
    REFUSED = "refused"
    TIMEOUT = "timeout"
    HTTP_STATUS = "http-status"
    EMPTY = "empty"
    UNPARSABLE = "unparsable"
    TOO_LARGE = "too-large"
    BROKEN = "broken"
    """The connection broke, or the answer was malformed."""
    ABSENT = "absent"
    """There is no exporter pod on the node any more."""
    CONTESTED = "contested"
    """There is more than one exporter pod on the node: see `targets`."""
    FOREIGN = "foreign"
    """The page names another node: the pod has ended, and its address belongs to that node's exporter."""
    NO_GPUS = "no-gpus"
    """The page has other series (of NVSwitches, CPUs), but shows none of the node's GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeFailure:
    kind: FailureKind
    message: str

    @property
    def answers(self) -> bool:
        """Whether the exporter answers, without any GPU: either it or all GPUs of the node failed."""
        return self.kind in (FailureKind.EMPTY, FailureKind.NO_GPUS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An exporter. The node comes from the pod, not from the page's content."""

    node: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    node: str
    started: float
    """Seconds since the Unix epoch, before the request was sent."""
    steady: float = 0.0
    """The same time on the monotonic clock."""
    seconds: float
    outcome: Page | ScrapeFailure
