"""Which pods join a running epoch in place, and who hands the state to whom. Pure.

A newcomer gets ready beside the running epoch, so nobody waits for its start. Then all members hold
at one boundary until it has taken the state of one of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from everstep_agent.peers.messages import (
    AgentReport,
    EpochLevel,
    EpochMember,
    InPlace,
    Stage,
    State,
    Transfer,
    WorkerReport,
)


def can_join(epoch: EpochLevel, reports: Iterable[AgentReport]) -> bool:
    """Whether all members can hold at a boundary for newcomers."""
    able = {r.id for r in reports if r.in_place}
    return epoch.stage is Stage.RUNNING and all(m.id in able for m in epoch.members)


def is_ready(report: AgentReport, epoch: EpochLevel) -> bool:
    """Whether this pod, which is no member, could join: it waits, or it was invited already."""
    return bool(report.fresh) or _is_invited(report, epoch.joining)


def plan_invitation(
    epoch: EpochLevel, candidates: Sequence[AgentReport], *, missing: int
) -> tuple[EpochMember, ...]:
    """The pods to invite, lowest slot first, each with its place in the next epoch."""
    invited = {m.id: m for m in epoch.joining}
    lives: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for report in candidates:
        if _is_invited(report, epoch.joining):
            lives[report.id] = invited[report.id].lives
        elif report.fresh and report.in_place:
            lives[report.id] = report.fresh
    chosen = sorted((r for r in candidates if r.id in lives), key=lambda r: r.slot)[:missing]
    slots = sorted([*(m.slot for m in epoch.members), *(r.slot for r in chosen)])
    return tuple(
        EpochMember(
            slot=r.slot,
            attempt=r.attempt,
            incarnation=r.incarnation,
            node_rank=slots.index(r.slot),
            lives=lives[r.id],
            address=r.address,
        )
        for r in chosen
    )


def are_prepared(joining: Sequence[EpochMember], reports: Iterable[AgentReport]) -> bool:
    prepared = {r.id: r.prepared for r in reports}
    return bool(joining) and all(prepared.get(m.id) == m.lives for m in joining)


def are_held(epoch: EpochLevel, workers: Sequence[WorkerReport]) -> bool:
    """Whether every member holds at the boundary at which newcomers join."""
    boundary = epoch.boundary
    return (
        boundary is not None
        and boundary.hold
        and len(workers) == epoch.world
        and all(w.state is State.HELD and w.standing is not None for w in workers)
    )


def plan_transfers(epoch: EpochLevel, key: str) -> tuple[Transfer, ...]:
    """Each newcomer takes from one member; no member gives twice before all have given once."""
    takers = [(m.slot, local) for m in epoch.joining for local in range(len(m.lives))]
    return tuple(
        Transfer(giver=number % epoch.world, slot=slot, local=local, key=f"{key}-{number}")
        for number, (slot, local) in enumerate(takers)
    )


def have_taken(joining: Sequence[EpochMember], reports: Iterable[AgentReport], step: int) -> bool:
    taken = {r.id: (r.prepared, r.taken) for r in reports}
    return all(taken.get(m.id) == (m.lives, step) for m in joining)


def find_lost(joining: Sequence[EpochMember], reports: Iterable[AgentReport]) -> str:
    """Why a newcomer cannot join any more; empty if all can."""
    by_id = {r.id: r for r in reports}
    for m in joining:
        report = by_id.get(m.id)
        if report is None or not _is_invited(report, joining):
            return f"slot {m.slot} was lost"
    return ""


def continue_epoch(
    epoch: EpochLevel,
    joining: Sequence[EpochMember],
    workers: Sequence[WorkerReport],
    *,
    number: int,
    token: str,
) -> EpochLevel:
    """The members of `epoch` and the newcomers, who all hold the same state at one boundary."""
    standings = [w.standing for w in workers if w.standing is not None]
    members = sorted([*epoch.members, *joining], key=lambda m: m.slot)
    return replace(
        epoch,
        number=number,
        token=token,
        stage=Stage.STARTING,
        members=tuple(replace(m, node_rank=i) for i, m in enumerate(members)),
        boundary=None,
        joining=(),
        transfers=(),
        cause="",
        in_place=InPlace(
            former=epoch.number,
            applied=max(s.applied for s in standings),
            reductions=max(s.reductions for s in standings),
        ),
    )


def _is_invited(report: AgentReport, joining: Sequence[EpochMember]) -> bool:
    """Invited, and the workers that were meant have not ended since."""
    mine = next((m for m in joining if m.id == report.id), None)
    if mine is None:
        return False
    ended = {e.local: e.life for e in report.ended}
    return all(ended.get(local, 0) < life for local, life in enumerate(mine.lives))
