"""What the members of an epoch report. Pure; linear in the number of members."""

from collections.abc import Collection, Iterable, Iterator

from everstep_agent.peers.agent_report import AgentReport, State, WorkerReport
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Id
from everstep_contract.sums import Sums

RUNNING = (State.STARTED, State.TRACKED, State.HELD)


def list_inside(
    epoch: EpochLevel, reports: Iterable[AgentReport]
) -> Iterator[tuple[EpochMember, AgentReport]]:
    """Members whose agents report that their workers are in this epoch."""
    members = {m.id: m for m in epoch.members}
    for report in reports:
        member = members.get(report.id)
        if member is not None and report.epoch == epoch.number:
            yield member, report


def list_lost(
    epoch: EpochLevel, reports: Iterable[AgentReport], over: Collection[tuple[int, int]]
) -> frozenset[Id]:
    """Members whose whole pod is lost: proven dead, or given up by the operator.

    Args:
        over: (slot, attempt) of pods that are over, according to the operator.
    """
    newest: dict[tuple[int, int], int] = {}
    for report in reports:
        place = report.slot, report.attempt
        newest[place] = max(report.incarnation, newest.get(place, 0))
    return frozenset(
        m.id
        for m in epoch.members
        if (m.slot, m.attempt) in over or newest.get((m.slot, m.attempt), 0) > m.incarnation
    )


def list_never_entered(epoch: EpochLevel, reports: Iterable[AgentReport]) -> frozenset[Id]:
    """Newcomers of an epoch that continues another one in place, whose workers have ended before
    their agents entered it: these never will.
    """
    if epoch.in_place is None:
        return frozenset()
    known = {m.id: m for m in epoch.members}
    return frozenset(
        report.id
        for report in reports
        if (member := known.get(report.id)) is not None
        and report.epoch not in (epoch.number, epoch.in_place.former)
        and have_ended(member, report)
    )


def have_ended(member: EpochMember, report: AgentReport) -> bool:
    """Whether all workers that this member has in the epoch have ended, as its agent reports."""
    ended = {e.local: e.life for e in report.ended}
    return all(ended.get(local, 0) >= member.lives[local] for local in member.ranks)


def list_workers(epoch: EpochLevel, reports: Iterable[AgentReport]) -> list[WorkerReport]:
    return [w for _, r in list_inside(epoch, reports) for w in r.workers]


def list_waits(workers: Iterable[WorkerReport]) -> list[Sums]:
    """The sums in which ranks wait."""
    able = (w for w in workers if w.waiting and not w.hung and w.state is not State.DEAD)
    return [w.sums for w in able if w.sums is not None]


def list_applied(epoch: EpochLevel, reports: Iterable[AgentReport]) -> dict[int, int]:
    """Last applied step of each rank that still runs in the epoch."""
    return {
        m.ranks[w.local]: w.applied
        for m, r in list_inside(epoch, reports)
        for w in r.workers
        if w.state in RUNNING
    }


def list_unsaved(epoch: EpochLevel, reports: Iterable[AgentReport]) -> set[int]:
    """Ranks that were asked to save the full state, and whose agents report that the save failed."""
    return {
        m.ranks[w.local] for m, r in list_inside(epoch, reports) for w in r.workers if w.unsaved
    }


def find_staged(epoch: EpochLevel, reports: Iterable[AgentReport]) -> int:
    """The newest step that all reporting agents have staged; 0: none."""
    return min((r.staged for _, r in list_inside(epoch, reports)), default=0)


def find_complete(epoch: EpochLevel, reports: Iterable[AgentReport]) -> int:
    """The newest step whose full state the agents hold, even if their workers are dead: every
    member has staged its part, or every rank of one unit has staged all that it holds; 0: none.
    """
    inside = list(list_inside(epoch, reports))
    parts = min(r.staged for _, r in inside) if len(inside) == len(epoch.members) else 0
    whole = {m.ranks[w.local]: w.whole for m, r in inside for w in r.workers}
    units = {epoch.mesh.list_unit_of(rank) for rank in whole}
    return max([parts, *(min(whole.get(rank, 0) for rank in unit) for unit in units)])


def find_held(epoch: EpochLevel, reports: Iterable[AgentReport]) -> int:
    """The newest step of which every member's agent holds its parts; 0: none."""
    held = [frozenset(r.kept) for _, r in list_inside(epoch, reports)]
    if len(held) < len(epoch.members):
        return 0
    return max(frozenset.intersection(*held), default=0)


def find_copied(
    epoch: EpochLevel, reports: Iterable[AgentReport], slots: Collection[int]
) -> int | None:
    """The newest step for which the parts of these slots' pods are also in other pods' memory;
    None: no member has one of these slots.
    """
    return min((r.copied for m, r in list_inside(epoch, reports) if m.slot in slots), default=None)
