"""Whether a running epoch has lost a member, and which. Pure.

Proof (an exit status, a terminated container, a newer incarnation) and the operator's decisions end
an epoch at once. A rank that came out of its collective by itself ends it too, though it proves
nobody's death: the cause is then looked for while the others come out. A silent agent is only
suspected, and not at all while the job's step advances: every member of a collective that moves is
alive.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep_agent import rounds
from everstep_agent.messages import (
    AgentReport,
    EpochLevel,
    EpochMember,
    FailureReport,
    State,
    WorkerReport,
)
from everstep_contract import levels, report

SILENT_SECONDS = 8.0
STUCK_FACTOR = 1.5
"""All wait for each other this many hang limits long: the group itself is stuck."""
ENDS_THE_JOB = frozenset(
    c.value
    for c in (
        report.Cause.SCRIPT_ERROR,
        report.Cause.MISUSE,
        report.Cause.NOT_FINITE,
        report.Cause.GUARD,
        report.Cause.STORE,
        report.Cause.CONFIG,
        report.Cause.RUN_EXISTS,
    )
)
"""Causes of a Failed frame that no restart can mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    cause: str
    message: str
    slot: int | None = None
    rank: int | None = None
    certain: bool = True
    """False: the group broke, by whom is not known yet."""
    failure: FailureReport | None = None
    dead_ms: int = 0


def find_break(
    epoch: EpochLevel,
    reports: Iterable[tuple[AgentReport, float]],
    wanted: levels.Wanted,
    *,
    idle: float,
    hang: float,
) -> Break | None:
    """`reports` with their age in seconds; `idle`: seconds since any member's step last advanced."""
    known = list(reports)
    by_id = {r.id: (r, age) for r, age in known}
    found = [
        b
        for m in epoch.members
        for b in (
            _of_member(m, wanted, [r for r, _ in known]),
            _of_workers(epoch, m, by_id.get(m.id, (None, 0.0))[0]),
            _of_silence(m, by_id.get(m.id), idle),
        )
        if b is not None
    ]
    found += _of_group(epoch, [r for r, _ in known], idle, hang)
    return min(found, key=_order, default=None)


def _order(found: Break) -> tuple[bool, bool, int]:
    """A death before its consequences; a user's error before another rank's death."""
    return not found.certain, found.failure is None, found.rank if found.rank is not None else -1


def _of_member(
    member: EpochMember, wanted: levels.Wanted, reports: Sequence[AgentReport]
) -> Break | None:
    slot, name = member.slot, f"slot {member.slot} (attempt {member.attempt})"
    if rounds.is_gone(slot, member.attempt, wanted):
        return Break(cause="Gone", message=f"{name} was declared gone", slot=slot)
    if any(
        (d.slot, d.attempt) == (slot, member.attempt) and d.incarnation >= member.incarnation
        for d in wanted.dead
    ):
        return Break(cause="AgentLost", message=f"the container of {name} terminated", slot=slot)
    for r in reports:
        newer = (r.attempt, r.incarnation) > (member.attempt, member.incarnation)
        if r.slot == slot and newer:
            text = f"{name} was started again (attempt {r.attempt}, incarnation {r.incarnation})"
            return Break(cause="AgentLost", message=text, slot=slot)
    return None


def _of_workers(epoch: EpochLevel, member: EpochMember, held: AgentReport | None) -> Break | None:
    if held is None:
        return None
    if held.broken is not None and epoch.commit and held.broken.manifest == epoch.commit.manifest:
        text = f"slot {member.slot} could not restore: {held.broken.message}"
        return Break(cause="CheckpointBroken", message=text, slot=member.slot)
    for ended in held.ended:
        if held.epoch != epoch.number and ended.life >= member.lives[ended.local]:
            rank = member.node_rank * len(member.lives) + ended.local
            return Break(
                cause="WorkerDied",
                message=f"rank {rank} ended before it began",
                slot=member.slot,
                rank=rank,
            )
    if held.epoch != epoch.number:
        return None
    found = (_of_worker(member, w) for w in held.workers)
    return min((b for b in found if b is not None), key=_order, default=None)


def _of_worker(member: EpochMember, worker: WorkerReport) -> Break | None:
    rank = member.node_rank * len(member.lives) + worker.local
    where = f"rank {rank} (slot {member.slot})"
    if worker.failed is not None:
        return Break(
            cause=worker.failed.cause,
            message=f"{where}: {worker.failed.message}",
            slot=member.slot,
            rank=rank,
            failure=worker.failed,
            dead_ms=worker.dead_ms or 0,
        )
    if worker.state is State.DEAD:
        return Break(
            cause="WorkerHung" if worker.hung else "WorkerDied",
            message=f"{where} {worker.why}",
            slot=member.slot,
            rank=rank,
            dead_ms=worker.dead_ms or 0,
        )
    if worker.state is State.PARKED and worker.why:
        return Break(
            cause="GroupBroken", message=f"{where}: {worker.why}", slot=None, certain=False
        )
    return None


def _of_silence(
    member: EpochMember, held: tuple[AgentReport, float] | None, idle: float
) -> Break | None:
    age = held[1] if held is not None else idle
    if min(age, idle) < SILENT_SECONDS:
        return None
    text = f"slot {member.slot} (attempt {member.attempt}) has been silent for {age:.0f} s"
    return Break(cause="AgentLost", message=text, slot=member.slot, certain=False)


def _of_group(
    epoch: EpochLevel, reports: Iterable[AgentReport], idle: float, hang: float
) -> list[Break]:
    workers = [w for r in reports if r.epoch == epoch.number for w in r.workers]
    stuck = workers and all(w.state is State.TRACKED and w.waiting for w in workers)
    if not stuck or idle < hang * STUCK_FACTOR:
        return []
    text = f"all ranks have waited for each other for {idle:.0f} s"
    return [Break(cause="GroupStuck", message=text, certain=False)]
