"""Which units are lost, and which of their ranks are alive and have to be ended. Pure.

A unit continues whole or not at all: without one of its ranks the others hold only parts of the
model. So the loss of a rank is the loss of its unit.
"""

from collections.abc import Collection, Iterable

from everstep_agent.coordinator.members import list_inside
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Id


def list_lost_units(
    epoch: EpochLevel, reports: Iterable[AgentReport], lost: Collection[Id] = ()
) -> frozenset[int]:
    """The units that have lost a rank, or in which a rank reports that a collective within the unit
    has failed.

    Args:
        lost: members whose pods are lost.
    """
    told = list(reports)
    word = {
        epoch.mesh.unit_of(member.ranks[worker.local])
        for member, report in list_inside(epoch, told)
        for worker in report.workers
        if worker.standing is not None and worker.standing.unit_lost
    }
    return list_broken_units(epoch, told, lost) | word


def list_broken_units(
    epoch: EpochLevel, reports: Iterable[AgentReport], lost: Collection[Id] = ()
) -> frozenset[int]:
    """The units that have lost a rank: it is dead, or its pod is lost."""
    dead = (
        member.ranks[worker.local]
        for member, report in list_inside(epoch, reports)
        for worker in report.workers
        if worker.state is State.DEAD
    )
    return list_units_of(epoch, lost) | {epoch.mesh.unit_of(rank) for rank in dead}


def list_living(
    epoch: EpochLevel,
    reports: Iterable[AgentReport],
    units: Collection[int],
    lost: Collection[Id] = (),
) -> tuple[int, ...]:
    """The living ranks of these units, as far as reported. Those of leaving members end anyway."""
    found = (
        member.ranks[worker.local]
        for member, report in list_inside(epoch, reports)
        if member.id not in lost and member.id not in epoch.leaving
        for worker in report.workers
        if worker.state is not State.DEAD
    )
    return tuple(sorted(rank for rank in found if epoch.mesh.unit_of(rank) in units))


def list_to_end(
    epoch: EpochLevel,
    reports: Iterable[AgentReport],
    lost: Collection[Id] = (),
    *,
    by_word: bool = True,
) -> tuple[int, ...]:
    """The ranks to end because their unit is lost, including those that were named before. If all
    units are lost, no more are named: then nobody continues in place.

    Args:
        by_word: also name ranks of a unit in which no rank is known to be dead.
    """
    told = list(reports)
    units = list_lost_units(epoch, told, lost)
    if len(units) * epoch.mesh.unit >= epoch.world:
        return epoch.ended
    certain = units if by_word else list_broken_units(epoch, told, lost)
    return tuple(sorted({*epoch.ended, *list_living(epoch, told, certain, lost)}))


def list_units_of(epoch: EpochLevel, ids: Collection[Id]) -> frozenset[int]:
    """The units that have ranks in these members."""
    return frozenset(
        epoch.mesh.unit_of(rank) for m in epoch.members if m.id in ids for rank in m.ranks.values()
    )


def with_mates(epoch: EpochLevel, ids: Collection[Id]) -> tuple[Id, ...]:
    """These members, and those that have ranks of the same units."""
    units = list_units_of(epoch, ids)
    return tuple(m.id for m in epoch.members if m.id in ids or _is_in(epoch, m, units))


def _is_in(epoch: EpochLevel, member: EpochMember, units: Collection[int]) -> bool:
    return any(epoch.mesh.unit_of(rank) in units for rank in member.ranks.values())
