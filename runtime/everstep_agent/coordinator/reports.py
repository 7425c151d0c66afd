"""The newest report of every agent."""

import asyncio
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

from everstep_agent.peers.agent_report import AgentReport, WorkerReport


class Reports:
    """The newest report of every container of an agent that ever reported, so that proof of a death
    is kept.

    Adding a report takes constant time. It wakes the coordinator only if there is something to act
    on; progress of the training alone is read periodically.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], tuple[AgentReport, float]] = {}
        self.changed = asyncio.Event()

    def take(self, report: AgentReport, now: float) -> None:
        held = self._known.get(report.id)
        self._known[report.id] = (report, now)
        if held is None or _what_counts(held[0]) != _what_counts(report):
            self.changed.set()

    def aged(self, now: float) -> list[tuple[AgentReport, float]]:
        """Each with its age in seconds."""
        return [(r, now - at) for r, at in self._known.values()]

    def all(self) -> list[AgentReport]:
        return [r for r, _ in self._known.values()]

    def recent(self, now: float, within: float) -> list[AgentReport]:
        return [r for r, age in self.aged(now) if age < within]


def _what_counts(report: AgentReport) -> tuple[object, ...]:
    return _of_agent(report), tuple(_of_worker(w) for w in report.workers)


def _without(
    cls: type[Any], *figures: str, more: tuple[str, ...] = ()
) -> Callable[[Any], tuple[object, ...]]:
    """All fields except the figures that change in every report of a training agent, and `more`
    properties.
    """
    names = (f.name for f in dataclasses.fields(cls) if f.name not in figures)
    return operator.attrgetter(*names, *more)


_of_agent = _without(AgentReport, "workers", "notice", "loss", "seconds", "read_back", "uploading")
_of_worker = _without(
    WorkerReport,
    "applied",
    "phase",
    "scope",
    "waiting",
    "dead_ms",
    "waited",
    "slowed",
    "still_ms",
    "still_limit_ms",
    "sums",
    more=("waits_long", "stands_still"),
)
