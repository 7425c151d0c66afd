"""Whether a running epoch has lost members, and which. Pure.

Proof (an exit status, a terminated container, a newer incarnation) and the operator's decisions end
an epoch at once. A rank that came out of its collective by itself ends it too, though it proves
nobody's death: the cause is then looked for while the others come out. A silent agent is only
suspected, and not at all while the job's step advances: every member of a collective that moves is
alive.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    """How long it had been so: since the death was noticed, or since the rank hung or fell silent."""
    others: tuple["Break", ...] = ()
    """Lost besides this one."""

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(b.slot for b in (self, *self.others) if b.slot is not None))

    @property
    def text(self) -> str:
        return "; ".join(b.message for b in (self, *self.others))


def find_break(
    epoch: EpochLevel,
    reports: Iterable[tuple[AgentReport, float]],
    wanted: levels.Wanted,
    *,
    idle: float,
    hang: float,
) -> Break | None:
    """`reports` with their age in seconds; `idle`: seconds since any member's step last advanced."""
    found = list_breaks(epoch, reports, wanted, idle=idle, hang=hang)
    return with_others(found[0], found) if found else None


def list_breaks(
    epoch: EpochLevel,
    reports: Iterable[tuple[AgentReport, float]],
    wanted: levels.Wanted,
    *,
    idle: float,
    hang: float,
) -> list[Break]:
    """All that is wrong, the likeliest cause first."""
    known = list(reports)
    by_id = {r.id: (r, age) for r, age in known}
    found: list[Break] = []
    for m in epoch.members:
        found += _of_member(m, wanted, [r for r, _ in known])
        found += _of_workers(epoch, m, by_id.get(m.id, (None, 0.0))[0])
        found += _of_silence(m, by_id.get(m.id), idle)
    found += _of_group(epoch, [r for r, _ in known], idle, hang)
    return sorted(found, key=_order)


def with_others(first: Break, found: Iterable[Break]) -> Break:
    """The cause, and the members that were lost besides; an error of the script stands for all."""
    if not first.certain or first.failure is not None or first.cause == "CheckpointBroken":
        return first
    named = [first, *first.others]
    for other in found:
        loss = other.certain and other.failure is None and other.slot is not None
        if loss and not any(_covers(known, other) for known in named):
            named.append(other)
    return replace(first, others=tuple(named[1:]))


def explain(found: Break, known: Sequence[Break]) -> Break:
    """A break whose cause was not known, by what has been learnt since: a death, else a silence."""
    if found.certain:
        return with_others(found, known)
    better = next((b for b in known if b.certain), None)
    if better is not None:
        return with_others(better, known)
    silent = [b for b in known if b.cause == "AgentLost"]
    if found.slot is not None or not silent:
        return found
    return replace(silent[0], others=tuple(silent[1:]))


def _covers(known: Break, other: Break) -> bool:
    return known.slot == other.slot and known.rank in (None, other.rank)


def _order(found: Break) -> tuple[bool, bool, int]:
    """A death before its consequences; a user's error before another rank's death."""
    return not found.certain, found.failure is None, found.rank if found.rank is not None else -1


def _of_member(
    member: EpochMember, wanted: levels.Wanted, reports: Sequence[AgentReport]
) -> list[Break]:
    slot, name = member.slot, f"slot {member.slot} (attempt {member.attempt})"
    if rounds.is_gone(slot, member.attempt, wanted):
        return [Break(cause="Gone", message=f"{name} was declared gone", slot=slot)]
    if any(
        (d.slot, d.attempt) == (slot, member.attempt) and d.incarnation >= member.incarnation
        for d in wanted.dead
    ):
        text = f"the container of {name} terminated"
        return [Break(cause="AgentLost", message=text, slot=slot)]
    for r in reports:
        newer = (r.attempt, r.incarnation) > (member.attempt, member.incarnation)
        if r.slot == slot and newer:
            text = f"{name} was started again (attempt {r.attempt}, incarnation {r.incarnation})"
            return [Break(cause="AgentLost", message=text, slot=slot)]
    return []


def _of_workers(epoch: EpochLevel, member: EpochMember, held: AgentReport | None) -> list[Break]:
    if held is None:
        return []
    if held.broken is not None and epoch.commit and held.broken.manifest == epoch.commit.manifest:
        text = f"slot {member.slot} could not restore: {held.broken.message}"
        return [Break(cause="CheckpointBroken", message=text, slot=member.slot)]
    if held.epoch < epoch.number < held.joined:
        text = f"slot {member.slot} has joined round {held.joined} and will not begin epoch {epoch.number}"
        return [Break(cause="GroupBroken", message=text, slot=member.slot, certain=False)]
    if held.epoch != epoch.number:
        over = [e.local for e in held.ended if e.life >= member.lives[e.local]]
        return [_of_early_end(member, local) for local in over]
    found = (_of_worker(member, w) for w in held.workers)
    return [b for b in found if b is not None]


def _of_early_end(member: EpochMember, local: int) -> Break:
    rank = member.node_rank * len(member.lives) + local
    text = f"rank {rank} ended before it began"
    return Break(cause="WorkerDied", message=text, slot=member.slot, rank=rank)


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
) -> list[Break]:
    age = held[1] if held is not None else idle
    if min(age, idle) < SILENT_SECONDS:
        return []
    text = f"slot {member.slot} (attempt {member.attempt}) has been silent for {age:.0f} s"
    return [
        Break(
            cause="AgentLost",
            message=text,
            slot=member.slot,
            certain=False,
            dead_ms=round(age * 1000),
        )
    ]


def _of_group(
    epoch: EpochLevel, reports: Iterable[AgentReport], idle: float, hang: float
) -> list[Break]:
    workers = [w for r in reports if r.epoch == epoch.number for w in r.workers]
    stuck = workers and all(w.state is State.TRACKED and w.waiting for w in workers)
    if not stuck or idle < hang * STUCK_FACTOR:
        return []
    text = f"all ranks have waited for each other for {idle:.0f} s"
    return [Break(cause="GroupStuck", message=text, certain=False, dead_ms=round(idle * 1000))]
