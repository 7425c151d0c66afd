"""Which rank saves after a cut. Pure.

The position is the furthest step that a living member applied or will apply: a rank that holds a
step's vector (phase *reduced* or later) knows that every member holds the reduced gradient, and
applying it needs no other rank. One rank parked there with a sound state saves the full state, so a
dead rank costs no step. If none of those can save, the furthest other rank does: this costs one
step, while the newest commit would cost all steps since. A member that neither reports nor is given
up is waited for only if no other rank can save: the next claim needs proof of its end anyway.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep_agent.peers.messages import AgentReport, EpochMember, Saver, State
from everstep_contract.position import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One member of the epoch that was cut, as far as known."""

    rank: int
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
) -> Decision:
    """`waited`: seconds since the cut; `patience`: how long to wait for an unreachable member
    though others can save.

    `committed`: newest step committed in this epoch; `failed`: ranks whose own save failed.
    """
    known = list(ranks)
    living = [r for r in known if r.alive]
    heard = [r for r in living if r.reachable or waited < patience]
    moving = [r for r in heard if not r.parked]
    if moving:
        return Wait(message=f"{_name(moving)} has not stopped yet")
    if not living:
        # The position page outlives its worker: how far a dead rank had come is known, its state is
        # lost.
        furthest = max((r.applied for r in known), default=0)
        return Nothing(target=max(committed, furthest), message="no member is alive")
    target = max((r.reach for r in heard), default=committed)
    fit = [r for r in heard if r.sound and r.reach > committed and r.rank not in failed]
    if fit:
        best = max(fit, key=lambda r: (r.reach, -r.rank))
        return Saver(rank=best.rank, step=best.reach)
    if heard and target <= committed:
        return Nothing(target=target, message=f"step {committed} is committed already")
    if len(heard) < len(living):
        silent = _name(r for r in living if not r.reachable)
        return Wait(message=f"{silent} does not answer and may hold the only copy of the state")
    return Nothing(target=target, message=f"no living rank holds the full state of step {target}")


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
    """`reports` with their age in seconds; a member that has not reported for `stale` seconds is
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
            found.append(_rank(rank, local, report, lost, epoch=epoch, fresh=age < stale))
    return found


def _rank(
    rank: int, local: int, report: AgentReport | None, lost: bool, *, epoch: int, fresh: bool
) -> Rank:
    held = report if report is not None and report.epoch == epoch else None
    worker = next((w for w in held.workers if w.local == local), None) if held else None
    if lost:
        applied = worker.applied if worker else 0
        return Rank(rank=rank, alive=False, reachable=False, applied=applied)
    if report is None:
        return Rank(rank=rank, alive=True, reachable=False)
    if worker is None and report.cut < epoch:
        # It may have started since its last report.
        return Rank(rank=rank, alive=True, reachable=fresh)
    if worker is None:
        # It never started this epoch, so it holds none of its state.
        return Rank(rank=rank, alive=False, reachable=fresh)
    return Rank(
        rank=rank,
        # A process that survives SIGKILL runs no more of its own code, so its state need not be
        # waited for. The next claim still needs proof of its end, or the operator's decision.
        alive=worker.state not in (State.DEAD, State.FAILED) and not worker.stuck,
        reachable=fresh,
        applied=worker.applied,
        phase=Phase(worker.phase),
        parked=worker.state in (State.PARKED, State.FINISHED),
        sound=worker.sound or worker.state is State.FINISHED,
    )
