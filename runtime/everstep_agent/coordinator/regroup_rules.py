"""Whether and how the survivors of a loss continue in the same step. Pure.

Every survivor has reported its standing: which reductions of the epoch are complete for it, and
which micro-batches of the next reduction it holds or will compute. It keeps these; the
micro-batches of the lost members are shared out (`share_rules.py`). If one survivor holds a vector
that others lack, the others hold the sums to which it belongs, because the vector is reduced last.
So the vector is handed on, and nobody copies state. A bucket whose sum every survivor holds is not
summed again: the sum contains what the lost members have computed. If ranks form units, the
survivors are the units that have lost no rank (`unit_losses.py`); the living ranks of the other
units are ended first.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from everstep_agent.coordinator import rounds, share_rules, unit_losses
from everstep_agent.coordinator.members import list_inside
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import (
    BegunBefore,
    EpochLevel,
    EpochMember,
    Id,
    InPlace,
    Saver,
    Stage,
)
from everstep_agent.peers.places import place_members
from everstep_contract import log
from everstep_contract.ranges import Ranges
from everstep_contract.units import ONE_RANK, Mesh
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
    passes: Mapping[int, int] = field(default_factory=dict)
    """Unit of the former epoch → as in `InPlace`."""
    begun: Mapping[int, share_rules.Begun] = field(default_factory=dict)
    """Rank that has not begun → what the ranks that compute the same micro-batches began with."""
    endpoints: Mapping[int, str] = field(default_factory=dict)
    """Rank → where the others reach it to form the next group; empty: not known of all."""
    complete_buckets: int = 0
    """As in `wire.Regroup`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskVector:
    """A rank has a vector that others need."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """The survivors cannot continue in place: all ranks have to restart."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """All that stay have reported their standing, but these ranks of lost units have not ended yet."""

    ranks: tuple[int, ...]


Decision = Plan | AskVector | Impossible


def why_not_in_place(
    epoch: EpochLevel,
    reports: Iterable[AgentReport],
    cause: str,
    *,
    failure: bool,
    lost: Collection[Id] = (),
) -> str:
    """Why all ranks must restart after a loss; empty if the survivors may continue in place.

    Args:
        reports: the newest of each agent; one that is silent may yet answer, or be given up.
        failure: the script itself failed, so the others would fail at the same samples.
        lost: members whose pods are lost.
    """
    able = {r.id for r in reports if r.in_place} | {*lost}
    if failure:
        return f"{cause}: the script failed"
    if not all(m.id in able for m in epoch.members):
        return "a member cannot (its image is older), or was never heard"
    return why_not_now(epoch)


def why_fixed(epoch: EpochLevel, reports: Iterable[AgentReport]) -> str:
    """Why the workers of a member can enter no other epoch; empty: all can."""
    return next((r.fixed for r in reports if r.fixed and epoch.member(*r.id)), "")


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
) -> tuple[tuple[EpochMember, ...], Decision | Wait | Ending]:
    """The survivors (without the ranks that their pods have lost), and what happens next.

    Args:
        reports: the newest of each agent that is not silent.
        lost: members whose pods are lost: they need not answer.
    """
    told = list(reports)
    held = {r.id: r for r in told if r.epoch == epoch.number}
    units = unit_losses.list_lost_units(epoch, told, lost)
    if len(units) * epoch.mesh.unit >= epoch.world:
        left = "no rank is left" if epoch.mesh.unit == 1 else "no unit is whole"
        return (), Impossible(reason=left)
    for member in (m for m in epoch.members if m.id not in lost):
        if why := _why_unknown(epoch, member, held.get(member.id), units):
            return (), Wait(message=why)
    if living := unit_losses.list_living(epoch, told, units, lost):
        return (), Ending(ranks=living)
    here = [m for m in epoch.members if m.id not in lost]
    standings = {r: s for m in here for r, s in _list_standings(m, held[m.id]).items()}
    staying = {r: s for r, s in standings.items() if epoch.mesh.unit_of(r) not in units}
    survivors = (_without_lost(m, staying) for m in here)
    plan = plan_regroup(staying, epoch.mesh)
    if isinstance(plan, Plan):
        # Who had counted the epoch's first step may be lost, and the others have yet to count it. It
        # belongs to the former epoch nevertheless.
        plan = replace(plan, applied=max(plan.applied, epoch.resume))
    return tuple(m for m in survivors if any(m.lives)), plan


def _why_unknown(
    epoch: EpochLevel, member: EpochMember, report: AgentReport | None, lost_units: Collection[int]
) -> str:
    """What is not known about this member yet; empty: it is known which of its ranks are dead, and
    how far those have come that stay.
    """
    slot = member.slot
    if report is None or len(report.workers) < len(member.ranks):
        return f"slot {slot} has not reported"
    if not has_joined(epoch, report):
        return f"slot {slot} has not joined epoch {epoch.successor}"
    alive = [w for w in report.workers if w.state is not State.DEAD]
    if alive and member.id in epoch.leaving:
        return f"slot {slot} has not left yet"
    stay = [w for w in alive if epoch.mesh.unit_of(member.ranks[w.local]) not in lost_units]
    if any(w.standing is None for w in stay):
        return f"slot {slot} has not told how far it is"
    return ""


def _list_standings(member: EpochMember, report: AgentReport) -> dict[int, Standing]:
    """The standings of this member's living ranks, by rank."""
    return {
        member.ranks[w.local]: w.standing
        for w in report.workers
        if w.state is not State.DEAD and w.standing is not None
    }


def _without_lost(member: EpochMember, staying: Collection[int]) -> EpochMember:
    ranks = member.ranks
    lives = (n if ranks.get(local) in staying else 0 for local, n in enumerate(member.lives))
    return replace(member, lives=tuple(lives))


def choose_keeper(
    epoch: EpochLevel, reports: Iterable[AgentReport], failed: Collection[int]
) -> Saver | None:
    """Which of the units that hold their step saves the state before that step, while the survivors
    wait for silent members: the state then outlives these ranks. None: there is nothing to save, or
    no unit can save it.

    Args:
        reports: the newest of each agent that is not silent.
        failed: ranks whose own save failed.
    """
    steps = {
        member.ranks[worker.local]: worker.standing.applied
        for member, report in list_inside(epoch, reports)
        for worker in report.workers
        if worker.state is State.HELD and worker.standing is not None
    }
    units = {epoch.mesh.list_unit_of(rank) for rank in steps.keys() - {*failed}}
    found = [
        Saver(rank=unit.start, step=steps[unit.start])
        for unit in units
        if len({steps.get(rank) for rank in unit}) == 1 and not {*unit} & {*failed}
    ]
    fit = [s for s in found if s.step > epoch.committed]
    return max(fit, key=lambda s: (s.step, -s.rank), default=None)


def has_joined(epoch: EpochLevel, report: AgentReport) -> bool:
    """Whether this member has joined the successor of the epoch, and no later epoch. Then no other
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
    """The number of the next epoch: the one that members are asked to join, unless it is used up."""
    told = list(reports)
    if any(is_promised_away(epoch, r) for r in told):
        burnt = max(burnt, epoch.successor)
    return rounds.choose_number(epoch.successor, log_epoch, told, burnt)


def why_not_again(
    epoch: EpochLevel, survivors: Sequence[EpochMember], plan: Plan, *, certain: bool = False
) -> str:
    """Why the same members may not continue together; empty if they may, or if some are lost.

    A group can break or get stuck without a death. All have reported their standing, so they form
    the group again, but only if this group has completed a step: if it cannot complete one, all
    ranks restart. The same holds for a unit that is lost although none of its ranks has died: it
    was ended, and comes back.

    Args:
        certain: a member is known to be lost.
    """
    former = {m.id: m for m in epoch.members}
    staying = {former[m.id].ranks[local] for m in survivors for local in m.ranks}
    lost = {*range(epoch.world)} - staying
    if plan.applied > epoch.resume or (lost and (certain or not lost <= {*epoch.ended})):
        return ""
    return "no member is known to be dead, and this group has completed no step"


def continue_epoch(
    epoch: EpochLevel, survivors: Sequence[EpochMember], plan: Plan, *, number: int, token: str
) -> EpochLevel:
    """The next epoch: the survivors in the order of their former ranks, each with its new one."""
    former = {m.id: m.ranks for m in epoch.members}
    before = [former[m.id][local] for m in survivors for local in m.ranks]
    return replace(
        epoch,
        number=number,
        token=token,
        stage=Stage.STARTING,
        members=place_members(survivors, epoch.slots_together),
        boundary=None,
        kept=0,
        backlog=0,
        saver=None,
        asked=None,
        joining=(),
        transfers=(),
        leaving=(),
        ended=(),
        hung=(),
        successor=0,
        successor_token="",
        cause="",
        in_place=build_in_place(epoch, plan, before),
    )


def build_in_place(epoch: EpochLevel, plan: Plan, before: Sequence[int]) -> InPlace:
    """`before`: by rank of the next epoch, the rank that it has in `plan`."""
    heads = before[:: epoch.mesh.unit]
    begun = {new: plan.begun[rank] for new, rank in enumerate(before) if rank in plan.begun}
    return InPlace(
        former=epoch.number,
        applied=plan.applied,
        reductions=plan.reductions,
        micro_batches=plan.micro_batches,
        shares=tuple(plan.shares[rank] for rank in before) if plan.shares else (),
        behind=tuple(new for new, rank in enumerate(before) if rank in plan.behind),
        vector=plan.vector,
        passes=tuple(plan.passes[epoch.mesh.unit_of(r)] for r in heads) if plan.passes else (),
        begun=tuple(BegunBefore(rank=r, share=b.share, passes=b.passes) for r, b in begun.items()),
        endpoints=tuple(plan.endpoints[rank] for rank in before) if plan.endpoints else (),
        complete_buckets=plan.complete_buckets,
    )


def note_commit(epoch: EpochLevel, newest: log.Commit | None) -> EpochLevel:
    """Note the newest commit of the lineage that this epoch continues. A former coordinator may
    have made it without this one's knowledge; without this note, a save of the same step would be
    refused forever.
    """
    return replace(epoch, committed=max(epoch.committed, newest.step if newest else 0))


def plan_regroup(standings: Mapping[int, Standing], mesh: Mesh = ONE_RANK) -> Decision:
    """How these ranks, which form whole units, continue.

    Args:
        standings: by rank of the epoch that was cut.
    """
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
    endpoints = {r: s.endpoint for r, s in standings.items()}
    plan = Plan(
        applied=max(s.applied for s in standings.values()),
        reductions=newest,
        micro_batches=max(s.micro_batches for s in ahead.values()),
        behind=behind,
        vector=vector if behind else "",
        endpoints=endpoints if all(endpoints.values()) else {},
        complete_buckets=0 if behind else min(s.complete_buckets for s in standings.values()),
    )
    begun = {
        r: share_rules.Begun.of(ahead[r].share, ahead[r].passes) if r in ahead else None
        for r in sorted(standings)
    }
    return _with_shares(begun, plan, mesh)


def _with_shares(
    begun: Mapping[int, share_rules.Begun | None], plan: Plan, mesh: Mesh
) -> Plan | Impossible:
    if all(found is None for found in begun.values()):
        return plan
    shared = share_rules.share_out(begun, plan.micro_batches, mesh)
    if isinstance(shared, str):
        return Impossible(reason=shared)
    return replace(plan, shares=shared.shares, passes=shared.passes, begun=shared.begun)
