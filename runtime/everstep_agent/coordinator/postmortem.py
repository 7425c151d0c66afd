"""Which unit saves after a cut. Pure.

The target is the furthest step that a living member has applied or will apply. A rank that holds a
step's vector (phase *reduced* or later) will apply that step: it knows that every member holds the
reduced gradient, and applying it needs no other unit.

A unit whose ranks are all parked at the target with a sound state saves the full state, each rank
what it holds. So a dead rank costs no step. If no such unit can save, the furthest other unit does:
this costs one step, while going back to the newest commit would cost all steps since.

A member that neither reports nor is given up is waited for only if its unit may be whole and no
other unit can save. The next claim needs proof of its end anyway.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import EpochMember, Saver
from everstep_contract.layout import name_ranks
from everstep_contract.position import Phase
from everstep_contract.units import ONE_RANK, Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One member of the epoch that was cut, as far as known."""

    rank: int
    slot: int
    alive: bool
    """Not known to be dead; `reachable` says whether its agent reports."""
    reachable: bool
    applied: int = 0
    phase: Phase = Phase.APPLIED
    parked: bool = False
    sound: bool = False

    @property
    def reach(self) -> int:
        """The step that it will have applied when it stops."""
        bound = not self.parked and self.phase in (Phase.REDUCED, Phase.APPLYING)
        return self.applied + (1 if bound else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """No save: the run continues from the newest commit. `target` is the position that is lost."""

    target: int
    message: str


Decision = Saver | Wait | Nothing


def decide_post_mortem(
    ranks: Iterable[Rank],
    *,
    committed: int,
    waited: float,
    patience: float,
    failed: frozenset[int] = frozenset(),
    ended: Collection[int] = (),
    mesh: Mesh = ONE_RANK,
) -> Decision:
    """`waited`: seconds since the cut; `patience`: how long to wait for an unreachable member
    though others can save.

    `committed`: newest step committed in this epoch; `failed`: ranks whose own save failed;
    `ended`: ranks that were ended because their unit had lost another one.
    """
    known = list(ranks)
    living = [r for r in known if r.alive]
    heard = [r for r in living if r.reachable or waited < patience]
    moving = [r for r in heard if not r.parked]
    if moving:
        return Wait(message=f"{_name(moving)} has not stopped yet")
    if not living:
        # The position page outlives its worker, so it is known how far a dead rank had come. Its
        # state is lost.
        target = max([committed, *(r.applied for r in known)])
        lost = [r for r in known if r.rank not in ended]
        told = _explain(lost, frozenset(), target, mesh) if ended else "no member is alive"
        return Nothing(target=target, message=told)
    target = max((r.reach for r in heard), default=committed)
    fit = [r for r in heard if r.sound and r.reach > committed and r.rank not in failed]
    whole = _list_whole(fit, mesh)
    if whole:
        best = max(whole, key=lambda unit: (unit[0].reach, -unit[0].rank))
        return Saver(rank=best[0].rank, step=best[0].reach)
    if heard and target <= committed:
        return Nothing(target=target, message=f"step {committed} is committed already")
    silent = {*living}.difference(heard)
    doubted = [r for unit in _list_whole([*fit, *silent], mesh) for r in unit if r in silent]
    if doubted:
        return Wait(
            message=f"{_name(doubted)} does not answer and may hold the only copy of the state"
        )
    lost = [r for r in known if r.rank not in ended]
    return Nothing(target=target, message=_explain(lost, frozenset(fit), target, mesh))


def list_hopeless(ranks: Iterable[Rank], mesh: Mesh) -> tuple[int, ...]:
    """Living ranks that have not stopped and whose unit has lost another rank. They cannot save,
    and may wait forever for that rank within the unit.
    """
    units = _group(ranks, mesh).values()
    broken = (unit for unit in units if not all(r.alive for r in unit))
    return tuple(r.rank for unit in broken for r in unit if r.alive and not r.parked)


def _list_whole(ranks: Iterable[Rank], mesh: Mesh) -> list[list[Rank]]:
    """The units whose ranks are all among these, at one step as far as known."""
    units = _group(ranks, mesh).values()
    whole = (unit for unit in units if len(unit) == mesh.unit)
    return [unit for unit in whole if len({r.reach for r in unit if r.parked}) < 2]


def _group(ranks: Iterable[Rank], mesh: Mesh) -> dict[int, list[Rank]]:
    """The ranks, by unit."""
    units: dict[int, list[Rank]] = {}
    for rank in sorted(ranks, key=lambda r: r.rank):
        units.setdefault(mesh.unit_of(rank.rank), []).append(rank)
    return units


def _explain(known: Sequence[Rank], fit: Collection[Rank], target: int, mesh: Mesh) -> str:
    """Why nobody can save."""
    if mesh.unit == 1:
        return f"no living rank holds the full state of step {target}"
    told = (_explain_unit(unit, ranks, fit, target) for unit, ranks in _group(known, mesh).items())
    return f"{', '.join(told)}; no unit is whole"


def _explain_unit(unit: int, ranks: Sequence[Rank], fit: Collection[Rank], target: int) -> str:
    dead = [f"rank {r.rank} (slot {r.slot})" for r in ranks if not r.alive]
    if dead:
        return f"unit {unit} lost {' and '.join(dead)}"
    behind = [r.rank for r in ranks if r.reachable and r.reach < target]
    if behind:
        return f"{name_ranks(behind)} of unit {unit} did not apply step {target}"
    return f"{name_ranks([r.rank for r in ranks if r not in fit])} of unit {unit} cannot save"


def _name(ranks: Iterable[Rank]) -> str:
    return "rank " + ", ".join(str(r.rank) for r in ranks)


def list_ranks(
    members: Sequence[EpochMember],
    reports: Iterable[tuple[AgentReport, float]],
    *,
    epoch: int,
    stale: float,
    gone: frozenset[tuple[int, int]] = frozenset(),
) -> list[Rank]:
    """`reports`: with their age in seconds. A member that has not reported for `stale` seconds is
    unreachable.
    """
    known = {r.id: (r, age) for r, age in reports}
    newest = {(r.slot, r.attempt): r.incarnation for r, _ in known.values()}
    found: list[Rank] = []
    for member in members:
        report, age = known.get(member.id, (None, 0.0))
        replaced = newest.get((member.slot, member.attempt), 0) > member.incarnation
        lost = replaced or (member.slot, member.attempt) in gone
        for local, rank in member.ranks.items():
            unknown = Rank(rank=rank, slot=member.slot, alive=not lost, reachable=not lost)
            found.append(_fill_in(unknown, local, report, epoch=epoch, fresh=age < stale))
    return found


def _fill_in(
    rank: Rank, local: int, report: AgentReport | None, *, epoch: int, fresh: bool
) -> Rank:
    held = report if report is not None and report.epoch == epoch else None
    worker = next((w for w in held.workers if w.local == local), None) if held else None
    if not rank.alive:
        return replace(rank, applied=worker.applied if worker else 0)
    if report is None:
        return replace(rank, reachable=False)
    if worker is None:
        # If it has not heard of the cut, it may have started since its last report. Otherwise it never
        # started this epoch, so it holds none of its state.
        return replace(rank, alive=report.cut < epoch, reachable=fresh)
    return replace(
        rank,
        # A process that survives SIGKILL runs no more of its own code, so its state need not be
        # waited for. The next claim still needs proof of its end, or the operator's decision.
        alive=worker.state not in (State.DEAD, State.FAILED) and not worker.stuck,
        reachable=fresh,
        applied=worker.applied,
        phase=Phase(worker.phase),
        parked=worker.state in (State.PARKED, State.FINISHED),
        sound=worker.sound or worker.state is State.FINISHED,
    )
