"""What the job tells the operator, from what its agents report. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep_agent.messages import AgentReport, EpochLevel, Stage, State
from everstep_contract import levels

NOTES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that `Seen` says and that no agent reports."""

    run: str
    epoch: int = 0
    """Newest of this job in the run log: a coordinator that has begun none yet is no step back."""
    coordinator: levels.SlotAttempt
    staged: levels.CheckpointRef | None = None
    committed: levels.CheckpointRef | None = None
    good: levels.CheckpointRef | None = None
    left: tuple[levels.Left, ...] = ()
    stopped: levels.Stopped | None = None
    done: bool = False
    failure: levels.Failure | None = None
    fenced: str = ""
    restarts: Mapping[str, int]
    notes: tuple[str, ...] = ()
    incidents: tuple[levels.RuntimeIncident, ...] = ()
    storage_error: levels.StorageError | None = None
    seconds: Mapping[str, float]


def build_seen(
    facts: Facts, epoch: EpochLevel | None, reports: Iterable[tuple[AgentReport, float]]
) -> levels.Seen:
    known = list(reports)
    inside = [(r, a) for r, a in known if epoch is not None and r.epoch == epoch.number]
    members = build_members(epoch, [r for r, _ in inside]) if epoch else ()
    lead = next(
        (r for r, _ in inside if epoch and (m := epoch.member(*r.id)) and m.node_rank == 0), None
    )
    held = facts.committed.step if facts.committed else 0
    # What a rank notes, every rank notes: the numbers are the global batch's.
    notes = dict.fromkeys([*facts.notes, *(lead.notes if lead else ())])
    return levels.Seen(
        run=facts.run,
        epoch=epoch.number if epoch else facts.epoch,
        running=epoch is not None and epoch.stage is Stage.RUNNING,
        coordinator=facts.coordinator,
        members=members,
        step=min((m.step for m in members), default=held),
        until=next((r.until for r, _ in inside if r.until is not None), None),
        loss=lead.loss if lead else None,
        staged=facts.staged,
        committed=facts.committed,
        good=facts.good,
        left=facts.left,
        stopped=facts.stopped,
        done=facts.done,
        failure=facts.failure,
        fenced=facts.fenced,
        restarts=dict(facts.restarts),
        notes=tuple(notes)[-NOTES:],
        incidents=facts.incidents,
        storage_error=facts.storage_error
        or next((r.storage_error for r, _ in known if r.storage_error is not None), None),
        seconds=dict(facts.seconds),
        age_ms=round(max((a for _, a in inside), default=0.0) * 1000),
    )


def build_members(epoch: EpochLevel, reports: Iterable[AgentReport]) -> tuple[levels.Member, ...]:
    """The living members of the epoch, by rank."""
    found = []
    for report in reports:
        member = epoch.member(*report.id)
        if member is None or epoch.stage is Stage.OVER:
            continue
        for worker in report.workers:
            if worker.state in (State.DEAD, State.FAILED):
                continue
            found.append(
                levels.Member(
                    slot=report.slot,
                    attempt=report.attempt,
                    incarnation=report.incarnation,
                    rank=member.node_rank * len(member.lives) + worker.local,
                    life=worker.life,
                    step=worker.applied,
                    scope=worker.scope,
                )
            )
    return tuple(sorted(found, key=lambda m: m.rank))


def build_left(
    wanted: levels.Wanted,
    reports: Sequence[AgentReport],
    epoch: EpochLevel | None,
    committed: levels.CheckpointRef | None,
    known: Iterable[levels.Left],
    unheard: frozenset[tuple[int, int]] = frozenset(),
    *,
    coordinator: tuple[int, int],
) -> tuple[levels.Left, ...]:
    """Slots whose pod holds nothing that the store lacks: out of every running epoch, the position
    committed. An epoch ends with its coordinator, a member or not, so that one is in it too.

    `unheard`: pods that may hold more than we know of. Once said it stays said, until the slot's next
    attempt shows up.
    """
    newest: dict[int, int] = {}
    for slot, attempt in [(p.slot, p.attempt) for p in wanted.peers] + [
        (r.slot, r.attempt) for r in reports
    ]:
        newest[slot] = max(newest.get(slot, 0), attempt)
    left = {(x.slot, x.attempt): x for x in known if x.attempt >= newest.get(x.slot, 0)}
    asked = {s: newest[s] for s in wanted.leave if s in newest}
    asked |= {r.slot: r.attempt for r in reports if r.leaving}
    inside = (
        {coordinator, *((m.slot, m.attempt) for m in epoch.members)}
        if epoch and epoch.stage is not Stage.OVER
        else set()
    ) | unheard
    for slot, attempt in asked.items():
        if (slot, attempt) not in inside and (slot, attempt) not in left:
            at = committed or levels.CheckpointRef(epoch=0, step=0)
            left[slot, attempt] = levels.Left(
                slot=slot, attempt=attempt, epoch=at.epoch, step=at.step, asked=slot in wanted.leave
            )
    return tuple(left[k] for k in sorted(left))


def hands_over(
    me: tuple[int, int],
    left: Iterable[levels.Left],
    wanted: levels.Wanted,
    epoch: EpochLevel | None,
) -> bool:
    """Whether the coordinator's own pod has left and there are others: one of them begins the next epoch."""
    named = {(p.slot, p.attempt) for p in wanted.peers}
    named |= {(m.slot, m.attempt) for m in (epoch.members if epoch else ())}
    return any((x.slot, x.attempt) == me for x in left) and bool(named - {me})
