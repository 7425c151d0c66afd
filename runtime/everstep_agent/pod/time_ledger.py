"""Where the seconds of this pod's ranks went. The worker accounts for them in its page while it
trains, the agent before and after. Pure.
"""

from everstep_agent.peers.epoch_level import Stage
from everstep_agent.peers.messages import Levels
from everstep_contract.levels import SlotAttempt
from everstep_contract.position import Position


def is_spare(published: Levels, pod: SlotAttempt) -> bool:
    """Whether the job trains at full size, and the pod waits for the place of another one."""
    level = published.epoch
    if level is None or level.stage is not Stage.RUNNING or pod not in published.seen.spares:
        return False
    return len({m.slot for m in level.members}) >= published.wanted.want_workers


class TimeLedger:
    """Cumulative seconds by category, summed over the local ranks. Every second of a rank is
    counted once.
    """

    def __init__(self) -> None:
        self._settled: dict[str, float] = {}
        self._pages: dict[tuple[int, int], dict[str, float]] = {}
        self._resting: dict[int, float] = {}
        """Local rank → since when it has had no worker that trains."""
        self._spare = False
        """The pod is a spare, or was one until the job lost a member."""

    def page(self, local: int, life: int, position: Position) -> None:
        """Note what the worker itself has accounted for since its Start."""
        self._pages[local, life] = dict(position.seconds)

    def rest(self, local: int, now: float) -> None:
        """This rank no longer trains: from now on the agent accounts for its seconds."""
        self._resting.setdefault(local, now)

    def tail(self, local: int, life: int, spent: float, category: str) -> None:
        """Charge those of the `spent` seconds since Start that the worker did not account for."""
        self.charge(category, spent - sum(self._pages.get((local, life), {}).values()))

    def cut(self, now: float) -> None:
        """Charge the resting ranks' time until `now` to `detect`: nobody had acted on the loss."""
        for local, since in self._resting.items():
            self.charge("detect", now - since)
            self._resting[local] = now

    def spare(self, now: float, *, first: bool) -> None:
        """The pod is a spare until now: it has no rank. `status.spareSeconds` has its time."""
        if not self._spare:
            for since in self._resting.values():
                self.charge(_waits(first=first), now - since)
        self._spare = True
        self._resting = dict.fromkeys(self._resting, now)

    def rests(self, local: int) -> bool:
        return local in self._resting

    def begin(self, now: float, *, restore: float, first: bool) -> None:
        """All local ranks start. A download took `restore` seconds of their rest."""
        for since in self._resting.values():
            waited = now - since
            self.charge("restore", min(restore, waited))
            self.charge(_waits(first=first and not self._spare), waited - min(restore, waited))
        self._resting.clear()
        self._spare = False

    def charge(self, category: str, seconds: float) -> None:
        self._settled[category] = self._settled.get(category, 0.0) + max(0.0, seconds)

    def total(self, now: float, waits: str) -> dict[str, float]:
        """All seconds until `now`. Those of ranks that still wait count as `waits`: only later is it
        known whether they wait for a download, or for somebody to act on their loss.
        """
        total = dict(self._settled)
        waited = 0.0 if self._spare else sum(now - since for since in self._resting.values())
        total[waits] = total.get(waits, 0.0) + max(0.0, waited)
        for page in self._pages.values():
            for name, spent in page.items():
                total[name] = total.get(name, 0.0) + spent
        return {k: round(v, 3) for k, v in total.items() if v > 0}


def _waits(*, first: bool) -> str:
    """The category of a rank that waits for its epoch."""
    return "startup" if first else "regroup"
