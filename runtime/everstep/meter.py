"""The worker's shared page: its position, and what each of its seconds is charged to."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from everstep.stretches import Stretches
from everstep.sum_marks import SumMarks
from everstep_contract.position import Position, PositionPage, Stretch, Where


class Meter:
    """Writes each change of position at once, so that it can be read after a SIGKILL.

    Args:
        page: None: nothing is written, for tests.
    """

    def __init__(self, page: PositionPage | None, *, epoch: int, applied: int) -> None:
        now = time.monotonic()
        self._page = page
        self._category, self._entered = "startup", now
        self.position = Position(epoch=epoch, applied=applied, since=now)
        """Changed in place."""
        self.sums = SumMarks(page)
        self._stretches = Stretches()
        self._marked, self._kind = now, Stretch.OTHER
        self._waits_as = Stretch.WAIT
        self._compiled_in = Stretch.OTHER
        self._moved: int | None = None
        self._write()

    def update(self, **changes: Any) -> None:
        """Change fields of the position."""
        self._charge()
        self._write(**changes)

    def enter(self, where: Where, *, category: str, limit: float = 0.0, **changes: Any) -> None:
        """Enter a scope. `limit`: in seconds; 0: the default of the scope."""
        self._charge()
        if self.position.scope is Where.STEP and where is Where.STEP:
            self._mark(Stretch.OTHER)  # ends the last stretch of the former step
            self._end_step()
        self._category = category
        self.update(scope=where, since=self._entered, limit_ms=int(limit * 1000), **changes)

    def begin_limit(self) -> None:
        """Let the time limit of the scope begin anew."""
        self._charge()
        self.update(since=self._entered)

    @contextmanager
    def charging(self, category: str, *, waiting: bool = False) -> Iterator[None]:
        """Charge the time inside to `category`. `waiting`: this rank waits for others, so it does not hang,
        and this time does not count against the limit of its scope.
        """
        before, was = self._category, self.position.waiting
        self._charge()
        began = self._entered
        self._category = category
        if waiting != was:
            self.update(waiting=waiting)
        else:
            self._mark(self._find_kind())
        try:
            yield
        finally:
            self._charge()
            self._category = before
            since = self.position.since
            if waiting and not was:
                since += self._entered - max(began, since)
            self.update(waiting=was, since=since)

    @contextmanager
    def summing(self) -> Iterator[None]:
        """A context for the wait for the sums of a step, in which `look` is called."""
        self._waits_as = Stretch.SUM
        try:
            with self.charging("wait", waiting=True):
                yield
        finally:
            self._waits_as = Stretch.WAIT

    def look(self, moved: int | None) -> None:
        """Called while this rank waits for a sum. Bytes that move are progress. If their number is
        unknown, they may be moving, so that counts as progress, too.

        Args:
            moved: bytes that the group's connections have carried so far; None: not known.
        """
        if moved is None or moved != self._moved:
            self._moved = moved
            self._mark(self._find_kind())
        elif self._page:
            self._page.note_look(time.monotonic())

    @contextmanager
    def fetching(self, *, usual: bool = True) -> Iterator[None]:
        """A context for the fetch of a micro-batch, which may take longer than computing. Both are progress.

        Its time is charged to `data`, with the clock of the marks; in the first
        step it is charged to start-up.

        Args:
            usual: whether earlier fetches tell how long this one may take. If not, it has no learnt limit.
        """
        before = self._category
        self._charge_until(self._mark(self._find_kind(Stretch.FETCH if usual else Stretch.OTHER)))
        self._category = before if before == "startup" else "data"
        try:
            yield
        finally:
            self._charge_until(self._mark(self._find_kind()))
            self._category = before

    def compiles(self, begins: bool) -> None:
        """Record that torch's compiler begins or has ended. The time between says nothing about how
        long this rank usually takes.
        """
        if begins:
            self._compiled_in = self._kind
        self._mark(Stretch.OTHER if begins else self._compiled_in)

    @property
    def limit(self) -> float:
        """Seconds of computing without a mark that this rank has learnt as its limit; 0: none yet."""
        return self._stretches.limit(Stretch.COMPUTE)

    @property
    def armed(self) -> int:
        """The step at whose boundary the agent wants to be asked; 0: none."""
        return self._page.armed if self._page else 0

    def seconds(self) -> dict[str, float]:
        return dict(self.position.seconds)

    def _charge(self) -> None:
        self._charge_until(time.monotonic())

    def _charge_until(self, now: float) -> None:
        seconds, spent = self.position.seconds, now - self._entered
        seconds[self._category] = seconds.get(self._category, 0.0) + spent
        self._entered = now

    def _write(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self.position, name, value)
        if self._page:
            self._page.write(self.position)
            self._mark(self._find_kind())

    def _find_kind(self, inside: Stretch = Stretch.COMPUTE) -> Stretch:
        steps = self.position.scope is Where.STEP
        if self.position.waiting:
            return self._waits_as if steps else Stretch.WAIT
        return inside if steps and self._category in ("step", "data") else Stretch.OTHER

    def _end_step(self) -> None:
        self._stretches.end_step()
        if self._page:
            self._page.group_limit = self._stretches.group_limit

    def _mark(self, kind: Stretch) -> float:
        """Begin a stretch of this kind. Return the time at which it begins."""
        now = time.monotonic()
        self._stretches.add(self._kind, now - self._marked)
        self._marked, self._kind = now, kind
        if self._page:
            self._page.mark(now, kind, self._stretches.limit(kind))
        return now
