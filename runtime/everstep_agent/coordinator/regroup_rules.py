"""Whether and how the survivors of a loss go on in the same step. Pure.

Every survivor has told its standing: which reductions of the epoch are complete for it, and which
micro-batches of the next one it holds or will compute. It keeps what it has; what the lost members
leave is shared out. If one survivor holds a vector that others lack, these others hold the sums to
which it belongs (the vector is reduced last), so the vector is handed on. Nobody copies state.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from everstep_agent.coordinator import rounds
from everstep_agent.coordinator.members import list_inside
from everstep_agent.peers.messages import (
    AgentReport,
    EpochLevel,
    EpochMember,
    Id,
    InPlace,
    Saver,
    Stage,
    State,
)
from everstep_agent.peers.places import place_members
from everstep_contract import log
from everstep_contract.ranges import Ranges, list_ranges, to_ranges
from everstep_contract.wire import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the next epoch begins with."""

    applied: int
    """Steps up to this one belong to earlier epochs."""
    reductions: int
    micro_batches: int = 0
    shares: Mapping[int, Ranges] = field(default_factory=dict)
    """Rank of the former epoch → its share; empty: no survivor has begun the next reduction."""
    behind: frozenset[int] = frozenset()
    """Ranks that need the vector of the last complete reduction."""
    vector: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskVector:
    """A rank has a vector that others need."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """The survivors cannot go on in place: the epoch has to be restarted."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    message: str


Decision = Plan | AskVector | Impossible


def why_not_in_place(
    epoch: EpochLevel,
    reports: Iterable[AgentReport],
    cause: str,
    *,
    failure: bool,
    lost: Collection[Id] = (),
) -> str:
    """Why a loss must restart the epoch; empty if its survivors may go on in place.

    Args:
        reports: the newest of each agent; one that is silent may yet answer, or be given up.
        failure: the script itself failed, so the others would fail at the same samples.
        lost: members whose pods are lost.
    """
    able = {r.id for r in reports if r.in_place} | {*lost}
    if failure:
        return f"{cause}: the script failed"
    if not all(m.id in able for m in epoch.members):
        return "a member cannot (it runs on GPUs, or its image is older), or was never heard"
    return why_not_now(epoch)


def why_not_now(epoch: EpochLevel) -> str:
    """Why the members cannot leave their group and keep their step; empty if they can."""
    if epoch.stage in (Stage.CUT, Stage.OVER):
        return "the epoch is over"
    if epoch.stage is Stage.STARTING and epoch.in_place is None:
        return "the epoch has not started yet"
    if epoch.boundary is not None and epoch.boundary.stay:
        return "the members are about to stop at a boundary"
    return ""


def decide_regroup(
    epoch: EpochLevel, reports: Iterable[AgentReport], lost: Collection[Id] = ()
) -> tuple[tuple[EpochMember, ...], Decision | Wait]:
    """The survivors (without the ranks that their pods have lost), and what follows for them.

    Args:
        reports: the newest of each agent that is not silent.
        lost: members whose pods are lost: they need not answer.
    """
    held = {r.id: r for r in reports if r.epoch == epoch.number}
    standings: dict[int, Standing] = {}
    survivors: list[EpochMember] = []
    for member in (m for m in epoch.members if m.id not in lost):
        workers = held[member.id].workers if member.id in held else ()
        if len(workers) < len(member.ranks):
            return (), Wait(message=f"slot {member.slot} has not reported")
        if not has_joined(epoch, held[member.id]):
            return (), Wait(message=f"slot {member.slot} has not joined epoch {epoch.successor}")
        alive = {w.local: w for w in workers if w.state is not State.DEAD}
        if alive and member.id in epoch.leaving:
            return (), Wait(message=f"slot {member.slot} has not left yet")
        told = {member.ranks[n]: w.standing for n, w in alive.items() if w.standing is not None}
        if len(told) < len(alive):
            return (), Wait(message=f"slot {member.slot} has not told how far it is")
        standings |= told
        if alive:
            lives = tuple(n if local in alive else 0 for local, n in enumerate(member.lives))
            survivors.append(replace(member, lives=lives))
    return tuple(survivors), plan_regroup(standings)


def choose_keeper(
    epoch: EpochLevel, reports: Iterable[AgentReport], failed: Collection[int]
) -> Saver | None:
    """Which of the ranks that hold their step saves the state before it, beside the wait for silent members: it then
    outlives this rank. None: that step is committed.

    Args:
        reports: the newest of each agent that is not silent.
        failed: ranks whose own save failed.
    """
    found = [
        Saver(rank=member.ranks[worker.local], step=worker.standing.applied)
        for member, report in list_inside(epoch, reports)
        for worker in report.workers
        if worker.state is State.HELD and worker.standing is not None
    ]
    fit = [s for s in found if s.step > epoch.committed and s.rank not in failed]
    return max(fit, key=lambda s: (s.step, -s.rank), default=None)


def has_joined(epoch: EpochLevel, report: AgentReport) -> bool:
    """Whether this member is promised to the successor of the epoch, and to no later one: no other
    coordinator can have it in an epoch of its own.
    """
    if not epoch.successor:
        return True
    return report.joined == epoch.successor and not is_promised_away(epoch, report)


def is_promised_away(epoch: EpochLevel, report: AgentReport) -> bool:
    """Whether this member has joined an epoch of the same number that another coordinator proposed."""
    same = report.joined == epoch.successor and epoch.member(*report.id) is not None
    return same and report.joined_token not in ("", epoch.successor_token)


def choose_successor(
    epoch: EpochLevel, log_epoch: int, reports: Iterable[AgentReport], burnt: int
) -> int:
    """The number of the next epoch: the one that members are asked to join already, unless it is used
    up.
    """
    told = list(reports)
    if any(is_promised_away(epoch, r) for r in told):
        burnt = max(burnt, epoch.successor)
    return rounds.choose_number(epoch.successor, log_epoch, told, burnt)


def why_not_again(epoch: EpochLevel, survivors: Sequence[EpochMember], plan: Plan) -> str:
    """Why the same members may not go on together; empty if they may, or if some are lost.

    A group can break, or get stuck, without a death: all have told their standing, so they form it
    anew. Only if this group has completed a step: where none gets through, the next rung is due.
    """
    if tuple(survivors) != epoch.members or plan.applied > epoch.resume:
        return ""
    return "no member is known to be dead, and this group has completed no step"


def continue_epoch(
    epoch: EpochLevel, survivors: Sequence[EpochMember], plan: Plan, *, number: int, token: str
) -> EpochLevel:
    """The next epoch: the survivors in the order of their slots, each with its new rank."""
    former = {m.id: m.ranks for m in epoch.members}
    before = [former[m.id][local] for m in survivors for local in m.ranks]
    return replace(
        epoch,
        number=number,
        token=token,
        stage=Stage.STARTING,
        members=place_members(survivors),
        boundary=None,
        saver=None,
        asked=None,
        joining=(),
        transfers=(),
        leaving=(),
        hung=(),
        successor=0,
        successor_token="",
        cause="",
        in_place=InPlace(
            former=epoch.number,
            applied=plan.applied,
            reductions=plan.reductions,
            micro_batches=plan.micro_batches,
            shares=tuple(plan.shares[rank] for rank in before) if plan.shares else (),
            behind=tuple(new for new, rank in enumerate(before) if rank in plan.behind),
            vector=plan.vector,
        ),
    )


def note_commit(epoch: EpochLevel, newest: log.Commit | None) -> EpochLevel:
    """`newest`: of the lineage that this epoch continues. A former coordinator may have committed it
    without the present one's knowledge; a save of that step would be refused for ever.
    """
    return replace(epoch, committed=max(epoch.committed, newest.step if newest else 0))


def plan_regroup(standings: Mapping[int, Standing]) -> Decision:
    """`standings` of all survivors, by rank of the epoch that was cut."""
    if not standings:
        return Impossible(reason="no rank is left")
    for rank, standing in sorted(standings.items()):
        if standing.problem:
            return Impossible(reason=f"rank {rank}: {standing.problem}")
    newest = max(s.reductions for s in standings.values())
    behind = frozenset(r for r, s in standings.items() if s.reductions < newest)
    if any(standings[r].reductions < newest - 1 for r in behind):
        return Impossible(reason="a rank is more than one reduction behind another")
    ahead = {r: s for r, s in sorted(standings.items()) if r not in behind}
    vector = next((s.vector for s in ahead.values() if s.vector), "")
    if behind and not vector:
        return AskVector(rank=min(ahead))
    return _with_shares(
        {r: standings[r].share if r in ahead else None for r in sorted(standings)},
        Plan(
            applied=max(s.applied for s in standings.values()),
            reductions=newest,
            micro_batches=max(s.micro_batches for s in ahead.values()),
            behind=behind,
            vector=vector if behind else "",
        ),
    )


def _with_shares(held: Mapping[int, Ranges | None], plan: Plan) -> Plan | Impossible:
    if all(share is None for share in held.values()):
        return plan
    taken = sorted(r for share in held.values() for r in share or ())
    for (_, last), (first, _) in itertools.pairwise(taken):
        if first < last:
            return Impossible(reason=f"two ranks hold micro-batch {first}")
    return Plan(
        applied=plan.applied,
        reductions=plan.reductions,
        micro_batches=plan.micro_batches,
        shares=share_out(held, plan.micro_batches),
        behind=plan.behind,
        vector=plan.vector,
    )


def share_out(held: Mapping[int, Ranges | None], micro_batches: int) -> dict[int, Ranges]:
    """Each rank keeps what it holds; the rest goes to those that have least, in rank order, in runs.

    Returns:
        Rank → its whole share; together every micro-batch below `micro_batches` once.
    """
    shares = {rank: list_ranges(share or ()) for rank, share in held.items()}
    rest = sorted(set(range(micro_batches)).difference(*shares.values()))
    counts = _fill({rank: len(share) for rank, share in shares.items()}, len(rest))
    for rank, count in counts.items():
        shares[rank] += rest[:count]
        rest = rest[count:]
    return {rank: to_ranges(share) for rank, share in shares.items()}


def _fill(have: Mapping[int, int], more: int) -> dict[int, int]:
    """How many each gets of `more`, so that the largest total is as small as it can be."""
    got = dict.fromkeys(sorted(have), 0)
    for _ in range(more):
        rank = min(got, key=lambda r: (have[r] + got[r], r))
        got[rank] += 1
    return got
