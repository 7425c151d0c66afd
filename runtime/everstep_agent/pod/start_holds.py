"""What keeps the next worker of a local rank from starting: this pod ends, a death has to be judged, the rank's last
workers could not join, or the survivors of a loss have their head start.
"""

import time
from collections.abc import Callable, Collection

from everstep_agent.peers.messages import Levels
from everstep_agent.pod import device_waits, head_start, refusals
from everstep_agent.pod.deaths import Deaths


class StartHolds:
    def __init__(self, deaths: Deaths, on_news: Callable[[], None]) -> None:
        self.quiet = False
        """No more workers start: the agent ends."""
        self.leave_by: float | None = None
        """By when (`time.monotonic`) this pod ends; None: no SIGTERM."""
        self._deaths = deaths
        self._on_news = on_news
        self._refusals: refusals.Refusals = {}
        self._refused: Collection[int] = ()
        """Local ranks whose next worker waits after a failed join."""
        self._head_start: head_start.HeadStart | None = None

    @property
    def leaving(self) -> bool:
        return self.leave_by is not None

    @property
    def ending(self) -> bool:
        return self.quiet or self.leaving

    def measure_notice(self, now: float) -> float | None:
        """The seconds until this pod ends; None: nobody has told it to end."""
        return None if self.leave_by is None else max(0.0, self.leave_by - now)

    @property
    def held_locals(self) -> Collection[int]:
        """Local ranks that wait for the operator's judgment of their device, or after a failed join."""
        return {*device_waits.held_locals(self._deaths.waits), *self._refused}

    def holds_all(self, published: Levels, now: float) -> bool:
        """Whether none of this pod's ranks may start its next worker now."""
        if self.ending or self._deaths.over:
            return True
        return head_start.lasts(self._head_start, published, now)

    def describe(self) -> str:
        """Why ranks of this pod could not join, for the status; empty: none was refused."""
        return refusals.describe(self._refusals)

    # --- what happens ----------------------------------------------------------------------------

    def refuse(self, local: int, problem: str, *, differs: bool = False) -> None:
        """This rank's worker could not join the running ranks."""
        now = time.monotonic()
        self._keep(refusals.refuse(self._refusals, local, problem, now, differs=differs))

    def forget_failed(self) -> None:
        """As `refusals.forget_failed`."""
        self._keep(refusals.forget_failed(self._refusals))

    def entered_epoch(self) -> None:
        self._refusals = {}

    def lost(self, newest: Levels | None, now: float) -> None:
        """A member of a running epoch is dead."""
        self._head_start = head_start.begin(newest, now)

    def look(self, newest: Levels | None, now: float) -> bool:
        """Check what depends on time. Returns whether a hold has ended."""
        judged = self._deaths.look(now)
        refused, self._refused = self._refused, refusals.held_locals(self._refusals, now)
        return judged or refused != self._refused or self._ends_head_start(newest, now)

    def _ends_head_start(self, newest: Levels | None, now: float) -> bool:
        if self._head_start is None or newest is None:
            return False
        if head_start.lasts(self._head_start, newest, now):
            return False
        self._head_start = None
        return True

    def _keep(self, found: refusals.Refusals) -> None:
        if found != self._refusals:
            self._refusals = found
            self._refused = refusals.held_locals(found, time.monotonic())
            self._on_news()
