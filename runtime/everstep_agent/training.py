"""While an epoch runs: its breaks, its boundaries, its saves, its end."""

import time
from dataclasses import dataclass

from everstep_agent import boundaries, rounds, runlog_rules
from everstep_agent.breaks import Break, find_break
from everstep_agent.desk import STALE_SECONDS, Desk
from everstep_agent.gathering import stop_here
from everstep_agent.messages import AgentReport, Boundary, EpochLevel, Stage, State, WorkerReport
from everstep_agent.recovering import recover
from everstep_contract import levels, log, names, report

FENCE_SECONDS = 10.0
"""How often the next place of the log is looked at; the rule asks for 30."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """An end in order, as it was when its boundary was armed."""

    purpose: str
    message: str
    slots: tuple[int, ...]
    id: str
    """Empty: as any incident's."""


@dataclass(slots=True)
class Watch:
    """What this loop remembers between two turns."""

    save_at: float
    raises: int = 0
    purpose: str = ""
    """Why the armed boundary ends the epoch (`boundaries.why_stay`); empty: it only saves."""
    move: Move | None = None
    """Not yet told as an incident."""


async def train(desk: Desk) -> str:
    """Until the epoch is over. Returns the cause for the next one."""
    now = time.monotonic()
    desk.step_at = (-1, now)
    watch = Watch(save_at=now)
    while not desk.ended:
        now = time.monotonic()
        epoch = desk.epoch
        assert epoch is not None
        found = _find_break(desk, epoch, now)
        if found is not None:
            return await recover(desk, found)
        workers = list_workers(desk, epoch)
        _advance(desk, epoch, workers, now)
        desk.saves.pump(epoch, desk.applied(), desk.seconds())
        if _all_finished(epoch, workers):
            if epoch.committed >= workers[0].applied:
                await _finish(desk, epoch, workers[0].applied)
                return ""
        elif epoch.stage is Stage.RUNNING and _boundary(desk, watch, workers, now):
            return watch.purpose
        desk.note_left()
        await desk.tick()
    return ""


def list_workers(desk: Desk, epoch: EpochLevel) -> list[WorkerReport]:
    return [
        w
        for r in desk.reports.all()
        if r.epoch == epoch.number and epoch.member(*r.id) is not None
        for w in r.workers
    ]


def _find_break(desk: Desk, epoch: EpochLevel, now: float) -> Break | None:
    return find_break(
        epoch,
        desk.reports.aged(now),
        desk.wanted,
        idle=desk.idle(now),
        hang=desk.settings.hang_seconds,
    )


def _advance(desk: Desk, epoch: EpochLevel, workers: list[WorkerReport], now: float) -> None:
    """STARTING → RUNNING, and the end of an incident with the first new step."""
    if len(workers) < epoch.world:
        return
    started = all(w.state not in (State.STARTED, State.READY) for w in workers)
    if epoch.stage is Stage.STARTING and started:
        desk.incidents.mark("restart", now)
        desk.line.say("epoch_runs", epoch=epoch.number, world=epoch.world, resume=epoch.resume)
        desk.set_epoch(stage=Stage.RUNNING)
    finished = all(w.state is State.FINISHED for w in workers)
    if (
        desk.incidents.resumed
        and started
        and (finished or min(w.applied for w in workers) > epoch.resume)
    ):
        desk.incidents.mark("first_step", now)
        ended = desk.incidents.close()
        if ended is not None:
            phases = " ".join(f"{p.name}={p.ms}ms" for p in ended.phases)
            desk.line.say(
                "recovered",
                incident=ended.id,
                cause=ended.cause,
                step=ended.step,
                steps_lost=ended.steps_lost,
                phases=phases,
            )
        desk.publish()


def _all_finished(epoch: EpochLevel, workers: list[WorkerReport]) -> bool:
    return (
        len(workers) == epoch.world
        and all(w.state is State.FINISHED for w in workers)
        and len({w.applied for w in workers}) == 1
    )


async def _finish(desk: Desk, epoch: EpochLevel, step: int) -> None:
    entry = log.Done(epoch=epoch.number, token=epoch.token, step=step)
    await desk.persist(lambda: desk.run_log.append(entry))
    if desk.run_log.done is None:
        await check_fence(desk)
        return
    nothing = "; there was nothing left to do" if epoch.resume >= step else ""
    desk.end(report.Cause.DONE, f"trained to step {step}{nothing}", step=step)


# --- boundaries ---------------------------------------------------------------------------------------------------


def _boundary(desk: Desk, watch: Watch, workers: list[WorkerReport], now: float) -> bool:
    """Arm, confirm, raise or settle the boundary; whether the epoch is over at it."""
    epoch = desk.epoch
    assert epoch is not None
    boundary = epoch.boundary
    if boundary is None:
        _arm(desk, watch, epoch, workers, now)
        return False
    _tell_move(desk, watch, now)
    recent = desk.reports.recent(now, STALE_SECONDS)
    moved = boundaries.advance(boundary, epoch.members, recent, raises=watch.raises)
    if moved != boundary:
        watch.raises += moved.step != boundary.step
        desk.set_epoch(boundary=moved)
        return False
    if not boundary.confirmed:
        return False
    if boundary.stay:
        return _stay(desk, watch, boundary, workers)
    if epoch.committed >= boundary.step or all(w.applied > boundary.step + 1 for w in workers):
        watch.save_at, watch.raises = now, 0
        desk.set_epoch(boundary=None)
    return False


def _arm(
    desk: Desk, watch: Watch, epoch: EpochLevel, workers: list[WorkerReport], now: float
) -> None:
    recent = desk.reports.recent(now, STALE_SECONDS)
    members = {m.slot for m in epoch.members}
    ready = [
        r for r in rounds.list_eligible(recent, desk.wanted) if r.fresh and r.slot not in members
    ]
    purpose = boundaries.why_stay(
        desk.wanted, epoch.members, recent, len(ready), coordinator=desk.me.id
    )
    every = desk.wanted.save_every_seconds
    due = boundaries.is_save_due(
        desk.settings.save_every_seconds if every is None else every,
        since_last=now - watch.save_at,
        busy=desk.saves.busy or bool(desk.saves.pending(epoch.number)),
    )
    if not purpose and not due:
        return
    watch.purpose, watch.raises = purpose, 0
    armed = boundaries.arm((w.applied for w in workers), stay=bool(purpose))
    watch.move = _describe_move(desk, purpose, epoch, recent)
    _tell_move(desk, watch, now)
    desk.line.say(
        "boundary_armed", step=armed.step, purpose=purpose or "Save", incident=desk.incidents.id
    )
    desk.set_epoch(boundary=armed)


def _describe_move(
    desk: Desk, purpose: str, epoch: EpochLevel, recent: list[AgentReport]
) -> Move | None:
    if purpose not in levels.IN_ORDER:
        return None
    told = boundaries.list_told(epoch.members, recent, coordinator=desk.me.id)
    slots = () if purpose == "Grow" else tuple(sorted({*told, *desk.wanted.leave}))
    # As the operator calls it when it sees the pod being deleted: nobody has to tell.
    by_signal = told and not desk.wanted.leave
    return Move(
        purpose=purpose,
        message=boundaries.describe_purpose(desk.wanted, purpose, slots),
        slots=slots,
        id=names.incident_id("PodDeleted", slots[0], told[slots[0]]) if by_signal else "",
    )


def _tell_move(desk: Desk, watch: Watch, now: float) -> None:
    """An incident of its own, once the recovery in which it was armed is over."""
    move = watch.move
    if move is None or desk.incidents.current is not None:
        return
    id = move.id or desk.new_incident()
    desk.incidents.open(id, move.purpose, move.message, now=now, slots=move.slots)
    desk.set_epoch(incident=id)
    watch.move = None


def _stay(desk: Desk, watch: Watch, boundary: Boundary, workers: list[WorkerReport]) -> bool:
    """All are parked at the boundary and their save is committed: the epoch is over."""
    parked = all(w.state in (State.PARKED, State.FINISHED) for w in workers)
    epoch = desk.epoch
    assert epoch is not None
    if parked:
        desk.incidents.mark("boundary", time.monotonic())
    if not parked or epoch.committed < boundary.step:
        return False
    desk.incidents.mark("commit", time.monotonic())
    if desk.incidents.current is not None:
        desk.incidents.current = desk.incidents.current.resumes(boundary.step, 0)
    desk.group.open_epoch(0)
    desk.set_epoch(stage=Stage.OVER, boundary=None, cause=watch.purpose)
    desk.line.say("epoch_over", epoch=epoch.number, step=boundary.step, purpose=watch.purpose)
    desk.note_left()
    if desk.wanted.stop is not levels.Stop.NONE:
        stop_here(desk)
    return True


# --- fencing ------------------------------------------------------------------------------------------------------


async def check_fence(desk: Desk) -> None:
    """Look at the next place of the log; end if somebody else has claimed the run.

    Waits while the store is away. A pod that a newer claim gives up has no say any more, though it may
    name others of its epoch.
    """
    epoch = desk.epoch
    await desk.persist(desk.run_log.refresh)
    await desk.persist(desk.run_log.check_kept)
    desk.over = runlog_rules.why_pod_is_over(
        desk.run_log.newest_claim, desk.settings.job_uid, *desk.me.place
    )
    if epoch is None:
        return
    gang = runlog_rules.Gang(
        epoch=epoch.number,
        job_uid=desk.settings.job_uid,
        pods=frozenset((m.slot, m.attempt) for m in epoch.members),
    )
    verdict = runlog_rules.fenced(desk.run_log.newest_claim, gang)
    if not verdict.ok:
        desk.end(report.Cause.FENCED, verdict.message)
