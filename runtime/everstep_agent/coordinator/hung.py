"""Which ranks are cut out because they have exceeded the limit that they learnt from their own steps. Pure.

An agent knows that a rank makes no progress; only here it is known that the others wait for it. If most ranks make
none, or some still compute, nobody is cut out: they may all do something slow.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from everstep_agent.coordinator.members import list_inside
from everstep_agent.peers.agent_report import AgentReport, State, WorkerReport
from everstep_agent.peers.epoch_level import EpochLevel, Hung, Stage

LEAST_SECONDS = 0.3
"""No wait: no rank learns a shorter limit."""
CALM_SECONDS = 600.0
"""No wait: after so long without such a cut the limits are the learnt ones again."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Each cut by a learnt limit may have been wrong: it doubles the limits of all ranks."""

    cut_at: tuple[float, ...] = ()

    def factor(self, now: float) -> int:
        return 1 << sum(now - at < CALM_SECONDS for at in self.cut_at)

    def after_cut(self, now: float) -> "Patience":
        kept = tuple(at for at in self.cut_at if now - at < CALM_SECONDS)
        return replace(self, cut_at=(*kept, now))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    slot: int
    unit: int
    worker: WorkerReport
    age: float
    """Of its report, in seconds."""


def list_hung(
    epoch: EpochLevel, reports: Iterable[tuple[AgentReport, float]], factor: float
) -> tuple[Hung, ...]:
    """Where all others wait for them. The ranks of a unit wait for each other in collectives that look like computing,
    so one that stops takes the others beyond their limits: if it is known to be stopped, only that one is named, and
    the others of its unit count as waiting. So does one whose node falls silent: as long as that may be so, nobody of
    the unit is named.

    Args:
        reports: with their age in seconds.
    """
    ranks = _list_ranks(epoch, reports)
    if epoch.stage is not Stage.RUNNING or len(ranks) < epoch.world:
        return ()
    over = [r for r in ranks if r.worker.overdue >= factor]
    stopped = {r.unit for r in over if r.worker.stopped}
    named = [r for r in over if r.worker.stopped or r.unit not in stopped]
    waiting = sum(r not in named and (r.worker.waiting or r.unit in stopped) for r in ranks)
    if waiting + len(named) < len(ranks) or len(named) > waiting:
        return ()
    return tuple(
        Hung(slot=r.slot, local=r.worker.local, life=r.worker.life)
        for r in named
        if r.worker.stopped
        or all(_is_heard(mate, r, factor) for mate in ranks if mate.unit == r.unit)
    )


def _list_ranks(epoch: EpochLevel, reports: Iterable[tuple[AgentReport, float]]) -> list[_Rank]:
    """Those that live."""
    known = list(reports)
    ages = {r.id: age for r, age in known}
    return [
        _Rank(slot=m.slot, unit=epoch.mesh.unit_of(m.ranks[w.local]), worker=w, age=ages[m.id])
        for m, r in list_inside(epoch, (r for r, _ in known))
        for w in r.workers
        if w.state is not State.DEAD
    ]


def _is_heard(mate: _Rank, hung: _Rank, factor: float) -> bool:
    """Whether the agent of a mate in its unit has spoken since `hung` exceeded its limit: by its own word, or because
    it found the mate beyond its own limit, too.
    """
    since = (hung.worker.overdue - factor) * LEAST_SECONDS
    return mate.slot == hung.slot or mate.worker.overdue >= factor or mate.age < since
