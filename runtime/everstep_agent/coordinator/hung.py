"""Which ranks are cut out because they have exceeded the limit that they have learnt from their own
steps. Pure.

An agent knows that a rank makes no progress; only the coordinator knows whether the others wait for
it. If most ranks make no progress, or some still compute, nobody is cut out: they may all do
something slow. Nor is the last one cut out that is still busy with it: if another rank exceeded its
limit in the same step, the others' limits are longer in that step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from everstep_agent.coordinator.members import list_inside, list_waits
from everstep_agent.peers.agent_report import AgentReport, State, WorkerReport
from everstep_agent.peers.epoch_level import EpochLevel, Hung, Stage
from everstep_contract.sums import describe_missed

LEAST_SECONDS = 0.3
"""The shortest limit that a rank learns."""
SLOW_FACTOR = 1.5
"""In a step in which another rank went without progress for more than its limit, a rank may go
without progress for this many times as long as that one did.
"""
CALM_SECONDS = 600.0
"""After this long without such a cut, the learnt limits apply again."""


@dataclass(frozen=True, slots=True)
class Patience:
    """A cut by a learnt limit may have been wrong, so each one doubles the limits of all ranks. Not
    that of a rank that a signal has stopped.
    """

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
    """Age of its report, in seconds."""


def list_hung(
    epoch: EpochLevel, reports: Iterable[tuple[AgentReport, float]], factor: float
) -> tuple[Hung, ...]:
    """The ranks that are beyond their limits while all others wait for them.

    The ranks of a unit wait for each other in collectives that look like computing, so a rank that
    stops takes the others of its unit beyond their limits, too. If it is known which rank is
    stopped, only that one is named, and the others of its unit count as waiting. A rank whose node
    falls silent has the same effect: as long as that may be the case, no rank of its unit is named.

    Args:
        reports: with their age in seconds.
        factor: by which the limits of all ranks are longer (`Patience`).
    """
    ranks = _list_ranks(epoch, reports)
    if epoch.stage is not Stage.RUNNING or len(ranks) < epoch.world:
        return ()
    factor = max(factor, _extend_limit(ranks))
    over = [r for r in ranks if r.worker.overdue >= (1 if r.worker.stopped_long else factor)]
    stopped = {r.unit for r in over if r.worker.stopped}
    named = [r for r in over if r.worker.stopped or r.unit not in stopped]
    waiting = sum(r not in named and (_waits(r.worker) or r.unit in stopped) for r in ranks)
    if waiting + len(named) < len(ranks) or len(named) > waiting:
        return ()
    waits = list_waits(r.worker for r in ranks if r not in named)
    return tuple(
        Hung(
            slot=r.slot,
            local=r.worker.local,
            life=r.worker.life,
            stopped=r.worker.stopped,
            missed=describe_missed(r.worker.sums, waits),
        )
        for r in named
        if r.worker.stopped
        or all(_is_heard(mate, r, factor) for mate in ranks if mate.unit == r.unit)
    )


def keep_named(
    hung: Sequence[Hung], former: Iterable[Hung], reports: Iterable[AgentReport]
) -> tuple[Hung, ...]:
    """`hung`, and those of `former` that have made no progress since: their agents may not have
    heard of it yet.
    """
    named = {_who(h) for h in hung}
    still = {
        (r.slot, w.local, w.life)
        for r in reports
        for w in r.workers
        if w.state is not State.DEAD and w.overdue >= 1
    }
    return (*hung, *(h for h in former if _who(h) in still - named))


def list_new(hung: Iterable[Hung], former: Iterable[Hung]) -> list[Hung]:
    """Those of `hung` that were not named before."""
    before = {_who(h) for h in former}
    return [h for h in hung if _who(h) not in before]


def _who(hung: Hung) -> tuple[int, int, int]:
    return hung.slot, hung.local, hung.life


def _list_ranks(epoch: EpochLevel, reports: Iterable[tuple[AgentReport, float]]) -> list[_Rank]:
    """The ranks that are alive."""
    known = list(reports)
    ages = {r.id: age for r, age in known}
    return [
        _Rank(slot=m.slot, unit=epoch.mesh.unit_of(m.ranks[w.local]), worker=w, age=ages[m.id])
        for m, r in list_inside(epoch, (r for r, _ in known))
        for w in r.workers
        if w.state is not State.DEAD
    ]


def _waits(worker: WorkerReport) -> bool:
    """A rank that a signal stopped while it waited holds up its unit like any other stopped rank."""
    return worker.waiting and not worker.stopped


def _extend_limit(ranks: Iterable[_Rank]) -> float:
    """The factor by which limits are longer in this step, because a rank that waits now was slow."""
    slowed = max((r.worker.slowed for r in ranks if r.worker.waiting), default=0.0)
    return SLOW_FACTOR * slowed if slowed > 1 else 0.0


def _is_heard(mate: _Rank, hung: _Rank, factor: float) -> bool:
    """Whether the agent of `mate`, a rank of the same unit, has reported since `hung` exceeded its
    limit, or has itself found `mate` beyond its limit, too.
    """
    since = (hung.worker.overdue - factor) * LEAST_SECONDS
    return mate.slot == hung.slot or mate.worker.overdue >= factor or mate.age < since
