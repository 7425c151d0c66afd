"""What the coordinator holds for its agents: their newest reports, and its own published levels."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from everstep_agent.messages import AgentReport, Levels
from everstep_agent.signals import Change
from everstep_contract import levels

LONG_POLL_SECONDS = 2.0


class Reports:
    """The newest report of every agent life that was ever heard of; a death stays proven."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], tuple[AgentReport, float]] = {}
        self.changed = asyncio.Event()

    def take(self, report: AgentReport, now: float) -> None:
        self._known[report.id] = (report, now)
        self.changed.set()

    def aged(self, now: float) -> list[tuple[AgentReport, float]]:
        return [(r, now - at) for r, at in self._known.values()]

    def all(self) -> list[AgentReport]:
        return [r for r, _ in self._known.values()]

    def recent(self, now: float, within: float) -> list[AgentReport]:
        return [r for r, age in self.aged(now) if age < within]


class Board:
    """The published levels. `seen` travels with them; it alone does not wake who waits, unless it
    matters to them.
    """

    def __init__(self, first: Levels, build_seen: Callable[[], levels.Seen]) -> None:
        self._levels = first
        self._build_seen = build_seen
        self._changed = Change()
        self.read: dict[str, int] = {}
        """Newest version that each reader was given."""

    @property
    def levels(self) -> Levels:
        return self._levels

    def publish(self, **changes: Any) -> bool:
        seen = self._build_seen()
        fresh = replace(self._levels, **changes, seen=seen)
        if _matter(fresh) == _matter(self._levels):
            self._levels = fresh
            return False
        self._levels = replace(fresh, version=self._levels.version + 1)
        self._changed.fire()
        return True

    async def wait_newer(self, version: int, reader: str = "") -> Levels:
        """The levels as soon as they are newer than `version`, or after a while the same ones with
        a fresh `seen`.
        """
        newer = await self._changed.until(lambda: self._levels.version > version, LONG_POLL_SECONDS)
        if not newer:
            self._levels = replace(self._levels, seen=self._build_seen())
        if reader:
            self.read[reader] = self._levels.version
        return self._levels


def _matter(document: Levels) -> tuple[object, ...]:
    seen = document.seen
    return (
        document.round,
        document.claimed,
        document.epoch,
        document.wanted,
        document.end,
        seen.left,
        seen.stopped,
        seen.done,
        seen.failure,
        seen.incidents,
    )
