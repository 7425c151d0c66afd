"""Which workers join a running epoch in place, and the epoch that follows. Pure.

They are workers of another pod, or they replace the ranks that a member has lost. They get ready
while the epoch runs, so nobody waits for their start. Then all members hold at one boundary until
each newcomer has copied the state of one of them: they compute their share of the next step, but do
not reduce it. If ranks form units, whole units join: the processes of a unit get ready together.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from everstep_agent.coordinator.boundaries import is_held_at
from everstep_agent.coordinator.members import have_ended, list_inside
from everstep_agent.coordinator.regroup_rules import (
    Plan,
    build_in_place,
    has_joined,
    plan_regroup,
)
from everstep_agent.coordinator.rounds import to_member
from everstep_agent.peers.agent_report import AgentReport, State, WorkerReport
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Id, Stage
from everstep_agent.peers.places import with_newcomers
from everstep_contract.units import form_units
from everstep_contract.wire import Standing


def can_join(epoch: EpochLevel, reports: Iterable[AgentReport]) -> bool:
    """Whether all members can hold at a boundary for newcomers."""
    able = {r.id for r in reports if r.in_place and not r.fixed}
    return epoch.stage is Stage.RUNNING and all(m.id in able for m in epoch.members)


def list_ready(epoch: EpochLevel, reports: Iterable[AgentReport]) -> list[AgentReport]:
    """The pods that could join, and the members that could replace their lost ranks: for each rank
    that is not in the epoch, a worker is ready, or is already invited.
    """
    inside = {m.slot: m for m in epoch.members}
    found = []
    for report in reports:
        member = inside.get(report.slot)
        here = member is None or member.id == report.id
        if here and (_waits(report, member) or is_invited(report, epoch.joining)):
            found.append(report)
    return found


def list_others(epoch: EpochLevel, ready: Iterable[AgentReport]) -> list[AgentReport]:
    """The pods in `ready` that are no members."""
    return [r for r in ready if epoch.member(*r.id) is None]


def plan_invitation(
    epoch: EpochLevel,
    ready: Sequence[AgentReport],
    *,
    missing: int,
    coming: Collection[int] = (),
    late: Collection[EpochMember] = (),
) -> tuple[EpochMember, ...]:
    """The workers to invite: all that replace lost ranks of members, and those of `missing` other
    pods. Invited pods stay so, then the lowest slots are next. Pods that form a unit follow each other.

    Args:
        coming: as in `list_blocks`.
        late: invited pods that should be ready to join by now.
    """
    lives = {r.id: _choose_lives(r, epoch.joining) for r in ready if epoch.member(*r.id)}
    returning = [(to_member(r, lives[r.id]),) for r in ready if lives.get(r.id)]
    together = epoch.slots_together
    able = [r for r in ready if r.in_place or is_invited(r, epoch.joining)]
    others = _choose_blocks(
        list_blocks(epoch, able, coming), missing // together, list_prepared(epoch, ready), late
    )
    return tuple(m for block in sorted([*returning, *others], key=_lowest) for m in block)


Block = tuple[EpochMember, ...]
"""Pods that join together: those of a unit, or one that holds whole units."""


def _choose_blocks(
    blocks: Sequence[Block],
    count: int,
    prepared: Collection[EpochMember],
    late: Collection[EpochMember],
) -> list[Block]:
    """`count` blocks, those that are ready to join first. Late blocks hold no place, but stay invited until
    `count` others are ready.
    """
    ready = [b for b in blocks if all(m in prepared for m in b)]
    slow = [b for b in blocks if any(m in late for m in b)]
    rest = [b for b in blocks if b not in ready and b not in slow]
    return [*[*ready, *rest][:count], *(slow if len(ready) < count else ())]


def list_blocks(
    epoch: EpochLevel, ready: Sequence[AgentReport], coming: Collection[int] = ()
) -> list[Block]:
    """The pods in `ready` that are no members, in whole units: first those that are invited, which get
    ready already, then the others, each lowest slot first.

    The processes of an invited unit form groups of their own, so the unit stays as it is. If one of
    its processes has ended, the others are invited again only after they, too, have been replaced.

    Args:
        coming: slots whose pods will be ready soon.
    """
    together, others = epoch.slots_together, {r.id: r for r in list_others(epoch, ready)}
    kept = [
        tuple(to_member(others[m.id], m.lives) for m in block)
        for block in _list_invited(epoch)
        if all(m.id in others and is_invited(others[m.id], epoch.joining) for m in block)
    ]
    inside = {m.id for block in kept for m in block}
    free = {r.slot: r for r in others.values() if r.id not in inside and r.fresh}
    units = form_units(free, together, coming)
    new = [tuple(to_member(free[slot], free[slot].fresh) for slot in unit) for unit in units]
    return [*sorted(kept, key=_lowest), *sorted(new, key=_lowest)]


def _list_invited(epoch: EpochLevel) -> list[Block]:
    """The invited pods that are no members, by unit."""
    others = [m for m in epoch.joining if epoch.member(*m.id) is None]
    together = epoch.slots_together
    return [tuple(others[at : at + together]) for at in range(0, len(others), together)]


def _lowest(block: Block) -> int:
    return min(m.slot for m in block)


def list_mates(epoch: EpochLevel, ids: Collection[Id]) -> frozenset[Id]:
    """These newcomers, and those that can join only with them."""
    broken = [block for block in _list_invited(epoch) if any(m.id in ids for m in block)]
    return frozenset(ids) | {m.id for block in broken for m in block}


def list_broken(epoch: EpochLevel, reports: Iterable[AgentReport]) -> frozenset[Id]:
    """The invited pods of which a worker has ended, or that are lost, and those that can join only with them."""
    by_id = {r.id: r for r in reports}
    invited = {id for id, report in by_id.items() if is_invited(report, epoch.joining)}
    return list_mates(epoch, {m.id for m in epoch.joining} - invited)


def list_prepared(epoch: EpochLevel, reports: Iterable[AgentReport]) -> tuple[EpochMember, ...]:
    """The invited workers that are ready to join; those of other pods in whole units."""
    prepared = {r.id: r.prepared for r in reports}
    apart = list_mates(epoch, {m.id for m in epoch.joining if prepared.get(m.id) != m.lives})
    return tuple(m for m in epoch.joining if m.id not in apart)


def are_prepared(joining: Sequence[EpochMember], reports: Iterable[AgentReport]) -> bool:
    prepared = {r.id: r.prepared for r in reports}
    return bool(joining) and all(prepared.get(m.id) == m.lives for m in joining)


def are_held(epoch: EpochLevel, workers: Sequence[WorkerReport]) -> bool:
    """Whether every member holds at the boundary at which newcomers join."""
    here = [w for w in workers if w.state is State.HELD and is_held_at(epoch.boundary, w.standing)]
    return len(here) == len(workers) == epoch.world


def list_standings(epoch: EpochLevel, reports: Iterable[AgentReport]) -> dict[int, Standing]:
    """The members' standings, by rank of `epoch`."""
    return {
        member.ranks[worker.local]: worker.standing
        for member, report in list_inside(epoch, reports)
        for worker in report.workers
        if worker.standing is not None
    }


def list_staying(epoch: EpochLevel) -> tuple[EpochMember, ...]:
    return tuple(m for m in epoch.members if m.id not in epoch.leaving)


def choose_joining(
    epoch: EpochLevel, taken: Sequence[EpochMember], want: int
) -> tuple[EpochMember, ...]:
    """The newcomers in `taken` for which there is room, in whole units: a member that was to leave
    may stay after all.
    """
    returning = [m for m in taken if epoch.member(*m.id) is not None]
    apart = list_mates(epoch, {m.id for m in epoch.joining if m not in taken})
    whole = [m for m in taken if m not in returning and m.id not in apart]
    room = max(0, want - len(list_staying(epoch)))
    return (*returning, *whole[: room - room % epoch.slots_together])


def have_joined(epoch: EpochLevel, reports: Iterable[AgentReport]) -> bool:
    """Whether all members that stay have joined the epoch that continues theirs."""
    joined = {r.id for r in reports if has_joined(epoch, r)}
    return all(m.id in joined for m in list_staying(epoch))


def have_left(epoch: EpochLevel, reports: Iterable[AgentReport], lost: Collection[Id] = ()) -> bool:
    """Whether the workers of all leaving members have ended.

    Args:
        lost: members whose pods are lost.
    """
    told = {r.id: r for r in reports}
    return all(
        m.id in lost or (m.id in told and have_ended(m, told[m.id]))
        for m in epoch.members
        if m.id in epoch.leaving
    )


def continue_epoch(
    epoch: EpochLevel,
    joining: Sequence[EpochMember],
    standings: Mapping[int, Standing],
    *,
    number: int,
    token: str,
) -> EpochLevel:
    """The next epoch: the members of `epoch` that stay, and the newcomers, who all hold the same
    state at one boundary. Members keep the micro-batches that they have begun since; those that
    leaving members had begun are shared out.

    Args:
        standings: of all members that stay, by rank of `epoch`.
    """
    following = with_newcomers(list_staying(epoch), joining, epoch.slots_together)
    former = _list_former(epoch, following, joining)
    some = next(standings[rank] for rank in former if rank is not None)
    fresh = replace(some, share=None, micro_batches=0, passes=0, endpoint="", complete_buckets=0)
    plan = plan_regroup(
        {rank: fresh if was is None else standings[was] for rank, was in enumerate(former)},
        epoch.mesh,
    )
    assert isinstance(plan, Plan)  # `are_held`: all are at the same place
    return replace(
        epoch,
        number=number,
        token=token,
        stage=Stage.STARTING,
        members=following,
        boundary=None,
        kept=0,
        backlog=0,
        joining=(),
        transfers=(),
        leaving=(),
        ended=(),
        successor=0,
        successor_token="",
        cause="",
        in_place=build_in_place(epoch, plan, range(len(former))),
    )


def _list_former(
    epoch: EpochLevel, following: Iterable[EpochMember], joining: Iterable[EpochMember]
) -> list[int | None]:
    """By rank of the next epoch: the rank that this worker has in `epoch`; None: a newcomer."""
    former = {(m.id, local): rank for m in epoch.members for local, rank in m.ranks.items()}
    new = {(m.id, local) for m in joining for local in m.ranks}
    places = [(m.id, local) for m in following for local in m.ranks]
    return [None if place in new else former[place] for place in places]


def _waits(report: AgentReport, member: EpochMember | None) -> bool:
    """Whether a worker is ready for each rank that this pod does not have in the epoch."""
    lives = member.lives if member is not None else (0,) * len(report.fresh)
    return bool(report.fresh) and [not f for f in report.fresh] == [bool(n) for n in lives]


def _choose_lives(report: AgentReport, joining: Sequence[EpochMember]) -> tuple[int, ...]:
    """The lives of the workers to invite; empty: they cannot join in place."""
    if is_invited(report, joining):
        return next(m.lives for m in joining if m.id == report.id)
    return report.fresh if report.in_place else ()


def is_invited(report: AgentReport, joining: Sequence[EpochMember]) -> bool:
    """Whether this pod is invited, and the invited workers have not ended since."""
    mine = next((m for m in joining if m.id == report.id), None)
    if mine is None:
        return False
    ended = {e.local: e.life for e in report.ended}
    return all(ended.get(local, 0) < mine.lives[local] for local in mine.ranks)
