"""Which ranks are cut out because they have exceeded the limit that they learnt from their own steps. Pure.

An agent knows that a rank makes no progress; only here it is known that the others wait for it. If most ranks make
none, or some still compute, nobody is cut out: they may all do something slow.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from everstep_agent.coordinator.members import list_inside
from everstep_agent.peers.messages import AgentReport, EpochLevel, Hung, Stage, State

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


def list_hung(epoch: EpochLevel, reports: Iterable[AgentReport], factor: float) -> tuple[Hung, ...]:
    """Where all others wait for them. The ranks of a unit wait for each other in collectives that look like computing,
    so one that stops takes the others beyond their limits: if it is known to be stopped, only that one is named.
    """
    inside = list(list_inside(epoch, reports))
    workers = [(m, w) for m, r in inside for w in r.workers if w.state is not State.DEAD]
    if epoch.stage is not Stage.RUNNING or len(workers) < epoch.world:
        return ()
    over = [(m, w) for m, w in workers if w.overdue >= factor]
    waiting = sum(w.waiting and w.overdue < factor for _, w in workers)
    if not over or waiting + len(over) < len(workers) or len(over) > waiting:
        return ()
    stopped = {epoch.mesh.unit_of(m.ranks[w.local]) for m, w in over if w.stopped}
    return tuple(
        Hung(slot=m.slot, local=w.local, life=w.life)
        for m, w in over
        if w.stopped or epoch.mesh.unit_of(m.ranks[w.local]) not in stopped
    )
