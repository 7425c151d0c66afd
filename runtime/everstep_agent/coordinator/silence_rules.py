"""Which members of an epoch are silent while the others wait for them, and whether the others may
continue without them. Pure.

A node that loses its power sends nothing, and its connections stay open, so the others' collectives
wait. The silence of its agent proves no death. But members that are more than half of the epoch's
claim may claim the next epoch without any proof (rule 2), and what a minority does after that does
not count.
"""

import math
from collections.abc import Collection, Iterable

from everstep_agent.coordinator.members import list_inside
from everstep_agent.coordinator.unit_losses import list_lost_units, list_units_of
from everstep_agent.peers.agent_report import AgentReport, State, WorkerReport
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Id, Stage
from everstep_agent.runlog import rules as runlog_rules
from everstep_contract import levels
from everstep_contract.log import Claim, MemberId

QUIET_SECONDS = 0.6
"""A member that has not reported for this long is asked, if the others have waited for long: in
that case a living agent reports twice in this time.
"""
SILENT_SECONDS = 2.0
"""The same limit, however long the others have waited: a living agent reports twice in this time
even in a quiet job.
"""


def list_doubted(
    epoch: EpochLevel, reports: Iterable[tuple[AgentReport, float]]
) -> tuple[EpochMember, ...]:
    """Members to ask whether they are alive: they report nothing, and all others wait.

    Args:
        reports: with their age in seconds.
    """
    known = {r.id: (r, age) for r, age in reports}
    ages = {m.id: known[m.id][1] if m.id in known else math.inf for m in epoch.members}

    def list_quiet(seconds: float) -> tuple[EpochMember, ...]:
        return tuple(m for m in epoch.members if ages[m.id] >= seconds)

    if epoch.stage is Stage.HOLD or _forms_anew(epoch):
        return list_quiet(QUIET_SECONDS)
    if epoch.stage is not Stage.RUNNING:
        return ()
    for limit, waits in ((QUIET_SECONDS, _waits_long), (SILENT_SECONDS, _waits)):
        quiet = list_quiet(limit)
        ids = {m.id for m in quiet}
        others = [known[m.id][0] for m in epoch.members if m.id not in ids]
        if not others or any(r.epoch != epoch.number for r in others):
            continue
        if all(map(waits, _list_judged(epoch, others, ids))):
            return quiet
    return ()


def _list_judged(
    epoch: EpochLevel, others: Iterable[AgentReport], quiet: Collection[Id]
) -> list[WorkerReport]:
    """The ranks that show whether the others wait for the quiet members. Ranks of the quiet
    members' units may wait within the unit, which looks like computing, so they count only if there
    are no others.
    """
    units = list_units_of(epoch, quiet)
    workers = [(m.ranks[w.local], w) for m, r in list_inside(epoch, others) for w in r.workers]
    outside = [w for rank, w in workers if epoch.mesh.unit_of(rank) not in units]
    return outside or [w for _, w in workers]


def list_silent(epoch: EpochLevel, reports: Iterable[tuple[AgentReport, float]]) -> frozenset[Id]:
    """Members that have not reported for a while, or have never reported."""
    heard = {r.id for r, age in reports if age < SILENT_SECONDS}
    return frozenset(m.id for m in epoch.members if m.id not in heard)


def list_yields(
    wanted: levels.Wanted, reports: Iterable[tuple[AgentReport, float]], listened: float
) -> tuple[levels.Yield, ...]:
    """The operator's yields for pods that are still silent. A pod that reports is not left out.

    Args:
        reports: of each agent the newest, and its age in seconds.
        listened: seconds since this coordinator took the role. A new one may not have heard pods that
            report.
    """
    if not wanted.yields or listened < SILENT_SECONDS:
        return ()
    heard = {(r.slot, r.attempt) for r, age in reports if age < SILENT_SECONDS}
    return tuple(y for y in wanted.yields if (y.slot, y.attempt) not in heard)


def list_yielded(
    epoch: EpochLevel, yields: Iterable[levels.Yield], newest: Claim | None
) -> frozenset[Id]:
    """The members that the operator's yields allow to leave out while `newest` is the newest claim."""
    given = {(y.slot, y.attempt) for y in yields if newest is not None and y.epoch == newest.epoch}
    return frozenset(m.id for m in epoch.members if m.id[:2] in given)


def list_left_out(
    wanted: levels.Wanted, newest: Claim | None, job_uid: str
) -> tuple[levels.Yield, ...]:
    """The operator's yields that the newest claim has used."""
    if newest is None or newest.job_uid != job_uid:
        return ()
    named = {(m.slot, m.attempt) for m in newest.members}
    return tuple(
        y for y in wanted.yields if y.epoch < newest.epoch and (y.slot, y.attempt) not in named
    )


def list_outvoted(
    epoch: EpochLevel,
    newest: Claim | None,
    silent: Collection[Id],
    lost: Collection[Id],
    reports: Iterable[AgentReport] = (),
    proven: Collection[MemberId] = (),
) -> frozenset[Id]:
    """The silent members, if the survivors may claim the next epoch without them; otherwise none.
    Survivors are the ranks whose units have lost no rank. The other ranks of pods that answer are
    dead, or will be ended by their agents before the claim.

    Args:
        newest: the newest claim that is in the log, or that is about to be appended.
        silent: members that do not answer.
        lost: members whose pods are lost, by proof or by the operator's decision.
        reports: the newest of each agent, which show the ranks that are dead in other pods.
        proven: members whose ends are proven.
    """
    if newest is None or newest.epoch != epoch.number or not silent:
        return frozenset()
    away = {*silent, *lost}
    units = list_lost_units(epoch, reports, away)
    rest, dead = list[MemberId](), list[MemberId]()
    for m in epoch.members:
        for rank, i in zip(m.ranks.values(), m.ids(), strict=True):
            if epoch.mesh.unit_of(rank) not in units:
                rest.append(i)
            elif m.id not in away or i in proven:
                dead.append(i)
    return frozenset(silent) if runlog_rules.holds_majority(newest, rest, dead) else frozenset()


def _forms_anew(epoch: EpochLevel) -> bool:
    """Whether an epoch that continues in place is forming its group, which takes hardly any time."""
    return epoch.stage is Stage.STARTING and epoch.in_place is not None


def _waits(worker: WorkerReport) -> bool:
    """Whether this rank can do nothing without the others. In a running epoch, a rank that holds is
    at a boundary at which newcomers join.
    """
    held_or_dead = worker.state in (State.HELD, State.DEAD)
    return held_or_dead or (worker.state is State.TRACKED and worker.waiting)


def _waits_long(worker: WorkerReport) -> bool:
    return worker.state is State.DEAD or (worker.state is State.TRACKED and worker.waits_long)
