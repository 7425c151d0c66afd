"""Whether a running epoch has lost members, and which. Pure.

Proof (an exit status, a terminated container, a newer incarnation) and the operator's decisions end
an epoch at once. So does a rank that left its collective by itself. That proves nobody's death: the
cause is looked for while the other ranks leave. A silent agent is only suspected, and not while the
job's step advances: every member of a process group that makes progress is alive.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from everstep_agent.checkpoint.commit_rules import Disagree
from everstep_agent.coordinator.boundaries import is_held_at
from everstep_agent.coordinator.members import list_waits
from everstep_agent.coordinator.pod_status import PodStatus, read_pod_status
from everstep_agent.peers.agent_report import AgentReport, FailureReport, State, WorkerReport
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Id, Stage
from everstep_contract import levels, log, report
from everstep_contract.sums import Sums, describe_missed

SILENT_SECONDS = 8.0
SAVE_LOST = "SaveLost"
"""The last save failed; no member was lost."""
REPLICAS_DIFFER = "ReplicasDiffer"
"""The ranks hold different values of the same state: no rank's state may be saved."""
BELOW_MINIMUM = "BelowMinimum"
"""The survivors of a loss have trained for too long with fewer pods than the job's minimum."""
STUCK_FACTOR = 1.5
"""If no rank can continue by itself for this many hang limits, the group itself is stuck."""
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
        report.Cause.COORDINATOR,
    )
)
"""Causes that a restart cannot repair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    cause: str
    message: str
    slot: int | None = None
    rank: int | None = None
    certain: bool = True
    """False: the group broke, and it is not known yet which member caused it."""
    fault: str = ""
    """Distinguishes two breaks with the same cause."""
    failure: FailureReport | None = None
    dead_ms: int = 0
    """Age of the failure in milliseconds: since the death was noticed, or since the rank hung or
    fell silent.
    """
    others: tuple["Break", ...] = ()
    """Members lost at the same time."""

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
    outvoted: Collection[Id] = (),
) -> Break | None:
    """`reports`: with their age in seconds; `idle`: seconds since any member's step last advanced;
    `outvoted`: silent members without which the others may continue.
    """
    found = list_breaks(epoch, reports, wanted, idle=idle, hang=hang, outvoted=outvoted)
    return with_others(found[0], found) if found else None


def find_late_start(
    epoch: EpochLevel,
    reports: Iterable[AgentReport],
    *,
    waited: float,
    limit: float,
    trouble: bool,
) -> Break | None:
    """`waited`: seconds since the claim; `trouble`: this agent or another waits for the store."""
    if epoch.stage is not Stage.STARTING or waited <= limit or trouble:
        return None
    begun = {
        r.id
        for r in reports
        if r.epoch == epoch.number and all(w.state is not State.STARTED for w in r.workers)
    }
    late = [m.slot for m in epoch.members if m.id not in begun]
    if not late:
        return None
    names = ", ".join(map(str, late[:8])) + (", …" if len(late) > 8 else "")
    text = f"slot {names} has not started epoch {epoch.number} in {waited:.0f} s"
    return Break(cause="GroupBroken", message=text, certain=False)


def find_late_regroup(
    epoch: EpochLevel,
    workers: Sequence[WorkerReport],
    *,
    waited: float,
    limit: float,
    limit_if_failed: float,
) -> Break | None:
    """A rank that is late with its group, or has failed to form it. A death that caused the failure
    is found earlier, if it is reported within `limit_if_failed`.

    Args:
        waited: seconds since the survivors' epoch was claimed.
    """
    if epoch.in_place is None or epoch.stage is not Stage.STARTING:
        return None
    held = [w for w in workers if w.state is State.HELD]
    why = next((f" ({w.why})" for w in held if w.why), "")
    if waited <= (limit_if_failed if why else limit):
        return None
    text = (
        f"{len(held)} of {epoch.world} ranks could not go on in place in {waited:.0f} s{why}; "
        "all restart"
    )
    return Break(cause="GroupBroken", message=text, certain=False)


def find_below_minimum(
    epoch: EpochLevel, least: int, *, short: float, limit: float
) -> Break | None:
    """`short`: seconds that the job has trained with fewer than `least` pods, after losses."""
    if epoch.in_place is None or len(epoch.members) >= least or short <= limit:
        return None
    text = (
        f"the job has trained with {len(epoch.members)} pods for {short / 60:.0f} minutes and needs at least {least} "
        "(workers.minReplicas, recovery.belowMinSeconds); it saves, stops and waits for more pods"
    )
    return Break(cause=BELOW_MINIMUM, message=text)


def find_refusal(refused: str) -> Break | None:
    """`refused`: why the epoch, which stepped first, cannot be claimed."""
    return Break(cause="GroupBroken", message=refused) if refused else None


def find_disagreement(
    epoch: EpochLevel, found: Disagree | None, commit: log.Commit | None
) -> Break | None:
    """`commit`: the checkpoint to which all go back; None: there is nothing to go back to."""
    if found is None or commit is None:
        return None
    odd = (
        found.difference.ranks[0]
        if found.difference.ranks and found.epoch == epoch.number
        else None
    )
    slot = next((m.slot for m in epoch.members if odd in m.ranks.values()), None)
    return Break(
        cause=REPLICAS_DIFFER,
        message=f"{found.message}; all go back to the checkpoint of step {commit.step}",
        slot=slot,
        rank=odd if slot is not None else None,
    )


def list_breaks(
    epoch: EpochLevel,
    reports: Iterable[tuple[AgentReport, float]],
    wanted: levels.Wanted,
    *,
    idle: float,
    hang: float,
    outvoted: Collection[Id] = (),
) -> list[Break]:
    """All breaks, the likeliest cause first."""
    known = list(reports)
    by_id = {r.id: (r, age) for r, age in known}
    newest = _newest_lives(r for r, _ in known)
    pods = read_pod_status(wanted)
    waits = list_waits(w for r, _ in known if r.epoch == epoch.number for w in r.workers)
    found: list[Break] = []
    for m in epoch.members:
        slot = pods.describe_slot(m)
        found += _of_member(m, slot, pods, newest.get(m.slot))
        found += _of_workers(epoch, m, slot, by_id.get(m.id, (None, 0.0))[0], waits)
        found += _of_silence(m, slot, by_id.get(m.id), idle, outvoted=m.id in outvoted)
    found += _of_group(epoch, [r for r, _ in known], idle, hang)
    return sorted(found, key=_order)


def with_others(first: Break, found: Iterable[Break]) -> Break:
    """`first`, together with the other lost members; if it is a silence, together with the other
    silent members. An error of the script stands alone.
    """
    if first.failure is not None or first.cause == "CheckpointBroken":
        return first
    if not first.certain and not _is_silence(first):
        return first
    named = [first, *first.others]
    covered = {(b.slot, b.rank) for b in named}
    for other in found:
        alike = other.certain if first.certain else _is_silence(other)
        loss = alike and other.failure is None and other.slot is not None
        # The loss of a whole slot covers the loss of its ranks.
        if loss and not covered & {(other.slot, None), (other.slot, other.rank)}:
            named.append(other)
            covered.add((other.slot, other.rank))
    return replace(first, others=tuple(named[1:]))


def explain(found: Break, known: Sequence[Break]) -> Break:
    """The break, with its cause replaced by what is known by now: a death, otherwise silent agents."""
    if found.certain:
        return with_others(found, known)
    better = next((b for b in known if b.certain), None)
    if better is not None:
        return with_others(better, known)
    silent = next((b for b in known if _is_silence(b)), None)
    if found.slot is None and silent is not None:
        return with_others(silent, known)
    return with_others(found, known)


def _is_silence(found: Break) -> bool:
    return found.cause == "AgentLost" and not found.certain


def _order(found: Break) -> tuple[bool, bool, bool, int]:
    """Sort key: a death comes before its consequences, and before the end of a leaving member. A
    user's error comes before the death of another rank.
    """
    rank = found.rank if found.rank is not None else -1
    return not found.certain, found.cause in levels.IN_ORDER, found.failure is None, rank


def _newest_lives(reports: Iterable[AgentReport]) -> dict[int, AgentReport]:
    """Slot → the report of its newest container."""
    found: dict[int, AgentReport] = {}
    for r in reports:
        held = found.get(r.slot)
        if held is None or r.id > held.id:
            found[r.slot] = r
    return found


def _of_member(
    member: EpochMember, named: str, pods: PodStatus, newest: AgentReport | None
) -> list[Break]:
    slot, name = member.slot, f"{named} (attempt {member.attempt})"
    if pods.is_gone(slot, member.attempt):
        return [Break(cause="Gone", message=f"the operator has given up {name}", slot=slot)]
    if pods.is_dead(*member.id):
        why = pods.why_dead(*member.id)
        text = f"the container of {name} terminated" + (f" ({why})" if why else "")
        return [Break(cause="AgentLost", message=text, slot=slot)]
    if newest is not None and newest.id > member.id:
        life = f"attempt {newest.attempt}, incarnation {newest.incarnation}"
        text = f"{name} was restarted ({life})"
        return [Break(cause="AgentLost", message=text, slot=slot)]
    return []


def _of_workers(
    epoch: EpochLevel,
    member: EpochMember,
    slot: str,
    held: AgentReport | None,
    waits: Sequence[Sums],
) -> list[Break]:
    if held is None:
        return []
    if held.broken is not None and epoch.commit and held.broken.manifest == epoch.commit.manifest:
        text = f"slot {member.slot} could not restore: {held.broken.message}"
        return [Break(cause="CheckpointBroken", message=text, slot=member.slot)]
    if held.epoch < epoch.number < held.joined:
        text = (
            f"slot {member.slot} has joined round {held.joined} and will not start epoch "
            f"{epoch.number}"
        )
        return [Break(cause="GroupBroken", message=text, slot=member.slot, certain=False)]
    if epoch.in_place is not None and held.epoch == epoch.in_place.former and _is_cut(held):
        text = f"slot {member.slot} was cut by another coordinator before epoch {epoch.number}"
        return [Break(cause="GroupBroken", message=text, slot=member.slot, certain=False)]
    if held.epoch != epoch.number:
        over = [e.local for e in held.ended if 0 < member.lives[e.local] <= e.life]
        return [_of_early_end(member, local) for local in over]
    found = (_of_worker(epoch, member, slot, w, waits) for w in held.workers)
    return [b for b in found if b is not None]


def _is_cut(report: AgentReport) -> bool:
    return any(w.state is State.PARKED for w in report.workers)


def _of_early_end(member: EpochMember, local: int) -> Break:
    rank = member.ranks[local]
    text = f"rank {rank} ended before the epoch started"
    return Break(cause="WorkerDied", message=text, slot=member.slot, rank=rank)


def _of_worker(
    epoch: EpochLevel,
    member: EpochMember,
    slot: str,
    worker: WorkerReport,
    waits: Sequence[Sums],
) -> Break | None:
    """`waits`: the sums in which ranks wait."""
    rank = member.ranks[worker.local]
    where = f"rank {rank} ({slot})"
    if worker.failed is not None:
        return Break(
            cause=worker.failed.cause,
            message=f"{where}: {worker.failed.message}",
            slot=member.slot,
            rank=rank,
            # A failed collective is a consequence: the death that caused it may be reported later.
            certain=worker.failed.cause != report.Cause.NETWORK_FAILED.value,
            fault=worker.failed.fault,
            failure=worker.failed,
            dead_ms=worker.dead_ms or 0,
        )
    if worker.stuck:
        return Break(
            cause=report.Cause.PROCESS_STUCK.value,
            message=f"{where} {worker.stuck}",
            slot=member.slot,
            rank=rank,
        )
    if worker.state is State.DEAD and rank in epoch.ended and not worker.cause:
        return None  # its agent ended it, because its unit is lost
    if worker.state is State.DEAD and member.id in epoch.leaving:
        text = f"slot {member.slot} has left"
        dead_ms = worker.dead_ms or 0
        return Break(cause="Leave", message=text, slot=member.slot, dead_ms=dead_ms)
    if worker.state is State.DEAD:
        missed = worker.missed or (describe_missed(worker.sums, waits) if worker.hung else "")
        return Break(
            cause=worker.cause or ("WorkerHung" if worker.hung else "WorkerDied"),
            fault=worker.fault,
            message="; ".join(filter(None, (f"{where} {worker.why}", missed))),
            slot=member.slot,
            rank=rank,
            dead_ms=worker.dead_ms or 0,
        )
    standing = worker.standing
    if standing is not None and standing.unit_lost and epoch.live:
        text = f"{where}: a collective within its unit failed"
        return Break(cause="GroupBroken", message=text, slot=None, certain=False)
    joins = is_held_at(epoch.boundary, standing)
    if worker.state is State.HELD and epoch.stage is Stage.RUNNING and not joins:
        text = f"{where}: a collective failed"
        return Break(cause="GroupBroken", message=text, slot=None, certain=False)
    if worker.state is State.PARKED and worker.why:
        return Break(
            cause="GroupBroken", message=f"{where}: {worker.why}", slot=None, certain=False
        )
    return None


def _of_silence(
    member: EpochMember,
    slot: str,
    held: tuple[AgentReport, float] | None,
    idle: float,
    *,
    outvoted: bool,
) -> list[Break]:
    age = held[1] if held is not None else idle
    if not outvoted and min(age, idle) < SILENT_SECONDS:
        return []
    text = f"{slot} (attempt {member.attempt}) has been silent for {age:.1f} s"
    if outvoted:
        text += " and does not answer"
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
    """Find a group that is stuck: all its ranks are in a collective, or have left it. Agents report
    no rank in a collective as hung.
    """
    workers = [w for r in reports if r.epoch == epoch.number for w in r.workers]
    inside = [w for w in workers if w.state is State.TRACKED and w.waiting]
    through = [w.applied for w in workers if w.state in (State.PARKED, State.FINISHED)]
    if len(inside) + len(through) < len(workers) or idle < hang * STUCK_FACTOR:
        return []
    # A rank that has applied the step waits for something else, such as room for its part of a save.
    behind = [w for w in inside if not through or w.applied < max(through)]
    if not behind:
        return []
    whom = "a step that the others have taken" if through else "each other"
    text = f"{len(behind)} of {len(workers)} ranks have waited for {whom} for {idle:.0f} s"
    return [Break(cause="GroupStuck", message=text, certain=False, dead_ms=round(idle * 1000))]
