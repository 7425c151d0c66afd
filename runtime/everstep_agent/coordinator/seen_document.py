"""The job's report to the operator, built from its agents' reports. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep_agent.coordinator import boundaries
from everstep_agent.coordinator.members import list_inside
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_contract import levels

NOTES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything in `Seen` that no agent reports."""

    run: str
    generation: int = 0
    epoch: int = 0
    """The job's newest epoch in the run log, so that a coordinator that has started none yet does
    not report a lower number.
    """
    coordinator: levels.SlotAttempt
    staged: levels.CheckpointRef | None = None
    committed: levels.CheckpointRef | None = None
    good: levels.CheckpointRef | None = None
    pinned: levels.Pinned | None = None
    refused: str = ""
    spares: tuple[levels.SlotAttempt, ...] = ()
    silent: tuple[levels.SlotAttempt, ...] = ()
    yielded: tuple[levels.Yield, ...] = ()
    left: tuple[levels.Left, ...] = ()
    stopped: levels.Stopped | None = None
    final_step: int | None = None
    """The step at which the script reached its end."""
    failure: levels.Failure | None = None
    fenced: str = ""
    restarts: Mapping[str, int]
    notes: tuple[str, ...] = ()
    not_joined: tuple[str, ...] = ()
    """Messages about pods that could not join."""
    incidents: tuple[levels.RuntimeIncident, ...] = ()
    storage_error: levels.StorageError | None = None
    seconds: Mapping[str, float]


def build_seen(
    facts: Facts, epoch: EpochLevel | None, reports: Iterable[tuple[AgentReport, float]]
) -> levels.Seen:
    known = list(reports)
    inside = [(r, a) for r, a in known if epoch is not None and r.epoch == epoch.number]
    held_by = list(list_inside(epoch, (r for r, _ in inside))) if epoch else []
    members = _build_members(held_by) if epoch and epoch.stage is not Stage.OVER else ()
    lead = next((r for m, r in held_by if m.node_rank == 0), None)
    held = facts.committed.step if facts.committed else 0
    # The lead's values stand for all ranks: they are the global batch's.
    agents = [r for r, _ in known]
    told = [
        *facts.notes,
        *(lead.notes if lead else ()),
        *(note for _, r in held_by for note in r.own_notes),
        *_list_unread(agents),
        *facts.not_joined,
        *_list_not_joined(agents),
    ]
    notes = dict.fromkeys(told)
    return levels.Seen(
        run=facts.run,
        generation=facts.generation,
        epoch=epoch.number if epoch else facts.epoch,
        running=epoch is not None and epoch.stage is Stage.RUNNING,
        in_place=epoch is not None and epoch.in_place is not None,
        coordinator=facts.coordinator,
        members=members,
        step=min((m.step for m in members), default=held)
        if facts.final_step is None
        else facts.final_step,
        until=next((r.until for r, _ in inside if r.until is not None), None),
        loss=lead.loss if lead else None,
        staged=facts.staged,
        copied_step=min((r.copied for _, r in held_by), default=0),
        kept_step=epoch.kept if epoch else 0,
        committed=facts.committed,
        good=facts.good,
        pinned=facts.pinned,
        refused=facts.refused,
        spares=facts.spares,
        silent=facts.silent,
        yielded=facts.yielded,
        left=facts.left,
        device_deaths=tuple(
            replace(d, age_ms=d.age_ms + round(age * 1000))
            for r, age in known
            for d in r.device_deaths
        ),
        stuck=tuple(
            levels.StuckPod(slot=r.slot, attempt=r.attempt, message=r.stuck)
            for r, _ in known
            if r.stuck
        ),
        stopped=facts.stopped,
        done=facts.final_step is not None,
        failure=facts.failure,
        fenced=facts.fenced,
        restarts=dict(facts.restarts),
        notes=tuple(notes)[-NOTES:],
        incidents=facts.incidents,
        storage_error=facts.storage_error,
        seconds=dict(facts.seconds),
        age_ms=round(max((a for _, a in inside), default=0.0) * 1000),
    )


def _list_unread(reports: Sequence[AgentReport]) -> Iterator[str]:
    """Messages about dropped output (`levels.POD_NOTE`). The count is rounded to the leading digit: an exact count
    would change the document with every line.
    """
    for report in sorted(reports, key=lambda r: r.slot):
        if report.dropped:
            unit = 10 ** (len(str(report.dropped)) - 1)
            lines = report.dropped // unit * unit
            text = f"slot {report.slot}: dropped {lines:,} lines or more: "
            yield text + "nobody reads the output of its pod"


def _list_not_joined(reports: Sequence[AgentReport]) -> Iterator[str]:
    for report in sorted(reports, key=lambda r: r.slot):
        if report.not_joined:
            yield f"slot {report.slot}: {report.not_joined}"


def find_generation(wanted: levels.Wanted, epoch: EpochLevel | None) -> int:
    """Generation of the newest spec that is fully in effect: settings that all members must share
    take effect with an epoch.
    """
    waits = epoch is not None and epoch.live and boundaries.why_renew(wanted, epoch)
    return epoch.generation if epoch is not None and waits else wanted.generation


def _build_members(
    inside: Iterable[tuple[EpochMember, AgentReport]],
) -> tuple[levels.Member, ...]:
    """The living members, by rank."""
    found = [
        levels.Member(
            slot=report.slot,
            attempt=report.attempt,
            incarnation=report.incarnation,
            rank=member.ranks[worker.local],
            life=worker.life,
            step=worker.applied,
            scope=worker.scope,
        )
        for member, report in inside
        for worker in report.workers
        if worker.state not in (State.DEAD, State.FAILED)
    ]
    return tuple(sorted(found, key=lambda m: m.rank))


def build_left(
    wanted: levels.Wanted,
    reports: Sequence[AgentReport],
    epoch: EpochLevel | None,
    committed: levels.CheckpointRef | None,
    known: Iterable[levels.Left],
    unheard: frozenset[tuple[int, int]] = frozenset(),
    *,
    coordinator: tuple[int, int] | None,
) -> tuple[levels.Left, ...]:
    """Slots that are asked to leave and whose pod holds no state that exists nowhere else: it is in
    no running epoch, and its state is committed, or the running epoch continued from it.

    `coordinator`: the pod that counts as inside even if it is no member, because the epoch would
    end with it; None: its successor can continue the epoch as it is. `unheard`: pods that may hold
    state of an epoch that the coordinator does not know of. A slot stays in the result until its
    next attempt reports.
    """
    newest: dict[int, int] = {}
    for slot, attempt in [(p.slot, p.attempt) for p in wanted.peers] + [
        (r.slot, r.attempt) for r in reports
    ]:
        newest[slot] = max(newest.get(slot, 0), attempt)
    left = {(x.slot, x.attempt): x for x in known if x.attempt >= newest.get(x.slot, 0)}
    asked = {s: newest[s] for s in wanted.leave if s in newest}
    asked |= {r.slot: r.attempt for r in reports if r.leaving}
    running = epoch is not None and epoch.stage is not Stage.OVER
    members = {(m.slot, m.attempt) for m in epoch.members} if epoch and running else set()
    held = {coordinator} if coordinator is not None and running else set()
    inside = members | held | unheard
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
    """Whether the coordinator's own pod has left and others remain: one of them starts the next
    epoch.
    """
    named = {(p.slot, p.attempt) for p in wanted.peers}
    named |= {(m.slot, m.attempt) for m in (epoch.members if epoch else ())}
    return any((x.slot, x.attempt) == me for x in left) and bool(named - {me})
