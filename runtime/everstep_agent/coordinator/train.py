"""A running epoch: its breaks, boundaries, saves, and end."""

from collections.abc import Sequence

from everstep_agent.coordinator import (
    boundary_turn,
    due_saves,
    fence,
    join,
    join_rules,
    last_save,
    leave_in_place,
    members,
    planned_moves,
    regroup,
)
from everstep_agent.coordinator.breaks import (
    Break,
    find_below_minimum,
    find_break,
    find_disagreement,
    find_late_regroup,
    find_late_start,
    find_refusal,
)
from everstep_agent.coordinator.hung import keep_named, list_hung, list_new
from everstep_agent.coordinator.recover import CAUSE_SECONDS, recover
from everstep_agent.coordinator.stuck import find_stuck
from everstep_agent.coordinator.term import STALE_SECONDS, Term
from everstep_agent.coordinator.unlike_ends import describe_unlike_ends
from everstep_agent.coordinator.unlike_feeds import describe_unlike_feeds
from everstep_agent.coordinator.watch import Watch
from everstep_agent.peers.agent_report import State, WorkerReport
from everstep_agent.peers.epoch_level import EpochLevel, Hung, Stage
from everstep_agent.runlog.run_log import Lost
from everstep_contract import levels, log, report

START_FACTOR = 6
"""Limit from the claim to the first step, restore included, in multiples of `startup_seconds`."""


async def train(term: Term) -> str:
    """Runs until the epoch is over. Returns the cause of the next one."""
    watch, wait = due_saves.start_watch(term, term.now()), last_save.Wait()
    while not term.ended:
        fence.end_if_taken_over(term)
        if term.ended:
            break
        now, epoch = term.now(), term.running
        regroup.look_for_silence(term)
        workers = members.list_workers(epoch, term.reports.all())
        found = _find_loss(term, watch, workers, now) or _find_stuck(term, now)
        held = found is None and join_rules.are_held(epoch, workers)
        changes = found is not None or held
        unsaved = changes and due_saves.is_any_uncommitted(term, watch, workers)
        if found is not None:
            lost = await _regroup(term, found)
            if lost is not None:
                return await recover(term, lost)
        elif held:
            await join.admit(term, leave_in_place.list_free_to_leave(term, watch))
        if found is not None or term.running.number > epoch.number:
            watch, wait = watch.renew(term.now()), last_save.Wait()
            if unsaved and term.running.committed == epoch.committed:
                watch.note_dropped(epoch.committed, term.now())
            continue
        _advance(term, workers, now)
        _cut_out(term, now)
        due_saves.want_pin(term, workers)
        due_saves.follow_near_saves(term, watch, now)
        term.pump(term.applied())
        if why := _why_impossible(term, workers):
            term.end(report.Cause.MISUSE, why)
            return ""
        if term.saves.disagreement is not None:
            continue
        if why := last_save.why_refused(term.running, workers, term.saves):
            term.end(report.Cause.NOT_FINITE, why)
            return ""
        lost = last_save.find_lost(
            term.running,
            workers,
            term.saves,
            wait,
            now=now,
            trouble=term.storage_error is not None,
            uploading=any(r.uploading for r in term.recent()),
        )
        if lost is not None:
            finished = workers[0].applied if _all_finished(epoch, workers) else None
            return await _save_again(term, lost, finished)
        if _all_finished(epoch, workers):
            if term.running.committed >= workers[0].applied and not term.running.unclaimed:
                await _finish(term, workers[0].applied)
                return ""
        elif term.running.stage is Stage.RUNNING and boundary_turn.settle(
            term, watch, workers, now
        ):
            return watch.purpose
        term.note_left()
        await term.wait_for_news()
    return ""


def _find_loss(
    term: Term, watch: Watch, workers: Sequence[WorkerReport], now: float
) -> Break | None:
    """A lost member, or a time limit of the epoch that has passed."""
    epoch, least, began = term.running, term.wanted.min_workers, now - watch.began
    return (
        find_refusal(term.state.refused)
        or find_disagreement(epoch, term.saves.disagreement, term.newest_commit())
        or _find_break(term, watch, now)
        or find_late_start(
            epoch,
            term.reports.all(),
            waited=began,
            limit=START_FACTOR * term.settings.startup_seconds,
            trouble=term.storage_error is not None,
        )
        or find_late_regroup(
            epoch,
            workers,
            waited=began,
            limit=regroup.FORM_SECONDS,
            limit_if_failed=CAUSE_SECONDS,
        )
        or find_below_minimum(
            epoch,
            least,
            short=watch.short(len(epoch.members) < least, now),
            limit=term.settings.below_min_seconds,
        )
    )


def _why_impossible(term: Term, workers: Sequence[WorkerReport]) -> str:
    """Why the job cannot train, or no checkpoint of it can be made; empty: as far as known, it can."""
    epoch, found = term.running, term.saves.disagreement
    whole = epoch.in_place is None and len(workers) == epoch.world
    begins = whole and min(w.applied for w in workers) <= epoch.resume + 1
    if begins and (unlike := describe_unlike_feeds(epoch, term.reports.all())):
        return unlike
    if unlike := describe_unlike_ends(epoch, term.reports.all()):
        return unlike
    if found is None or term.newest_commit() is not None:
        return term.saves.impossible
    return (
        f"{found.message}. It is the first save, so some tracked state probably belongs to one rank only, or was made "
        "with random numbers of its own on each rank: make the model in main, not before everstep.run, and with no "
        "seed that depends on the rank. Track with "
        "job.track what is the same on every rank, and the rest with job.track_local"
    )


async def _regroup(term: Term, found: Break) -> Break | None:
    """Continue in place if possible. Returns the loss if all ranks have to restart; None: the
    survivors continue in place.
    """
    why = regroup.why_not(term, found)
    return found if why else await regroup.regroup(term, found)


def _find_break(term: Term, watch: Watch, now: float) -> Break | None:
    return find_break(
        term.running,
        term.reports.aged(now),
        term.wanted,
        idle=watch.idle(max(term.applied().values(), default=0), now),
        hang=term.settings.hang_seconds,
        outvoted=() if regroup.why_not_wanted(term) else regroup.list_outvoted(term),
    )


def _find_stuck(term: Term, now: float) -> Break | None:
    """A sum in which nothing moves, if the members may form their group again."""
    found = find_stuck(term.running, term.reports.aged(now), term.patience.factor(now))
    if found is None or regroup.why_not(term, found):
        return None
    term.patience = term.patience.after_cut(now)
    return found


def _advance(term: Term, workers: Sequence[WorkerReport], now: float) -> None:
    """STARTING → RUNNING; the first new step closes the incident."""
    epoch = term.running
    if len(workers) < epoch.world:
        return
    started = all(w.state not in (State.STARTED, State.READY, State.HELD) for w in workers)
    if epoch.stage is Stage.STARTING and started:
        term.line.say("epoch_runs", epoch=epoch.number, world=epoch.world, resume=epoch.resume)
        phase = "form" if epoch.in_place is not None else "restart"
        term.change(term.state.mark(phase, now).run_epoch())
    finished = all(w.state is State.FINISHED for w in workers)
    stepped = finished or min(w.applied for w in workers) > epoch.resume
    if term.state.incidents.resumed and started and stepped:
        _close_incident(term, now)


def _cut_out(term: Term, now: float) -> None:
    """Have ranks ended that make no progress while all others wait for them."""
    former = term.running.hung
    may = _may_cut_out(term)
    hung = keep_named(_list_hung(term, now), former, term.recent()) if may else ()
    if hung != former:
        if any(not found.stopped for found in list_new(hung, former)):
            term.patience = term.patience.after_cut(now)
        term.change(term.state.cut_out(hung))


def _may_cut_out(term: Term) -> bool:
    """Whether the others can do without a rank that is cut out. If the job is to stop, they only have
    to save, which one whole unit can.
    """
    if not all(r.in_place for r in term.recent()):
        return False
    if term.wanted.stop is not levels.Stop.NONE:
        return term.running.world > term.running.mesh.unit
    return not regroup.why_not_wanted(term)


def _list_hung(term: Term, now: float) -> tuple[Hung, ...]:
    recent = [(r, age) for r, age in term.reports.aged(now) if age < STALE_SECONDS]
    return list_hung(term.running, recent, term.patience.factor(now))


def _close_incident(term: Term, now: float) -> None:
    closed = term.state.incidents.mark("first_step", now).close()
    ended = closed.closed[-1]
    term.line.say(
        "recovered",
        incident=ended.id,
        cause=ended.cause,
        step=ended.step,
        steps_lost=ended.steps_lost,
        phases=" ".join(f"{p.name}={p.ms}ms" for p in ended.phases),
    )
    term.change(term.state.with_incidents(closed))


def _all_finished(epoch: EpochLevel, workers: Sequence[WorkerReport]) -> bool:
    return (
        len(workers) == epoch.world
        and all(w.state is State.FINISHED for w in workers)
        and len({w.applied for w in workers}) == 1
    )


async def _save_again(term: Term, lost: Break, finished: int | None) -> str:
    """Have one rank save the full state. If all ranks have `finished` that step, no further epoch
    is needed.
    """
    cause = await recover(term, lost)
    if finished is None or term.ended or term.running.committed < finished:
        return cause
    _close_incident(term, term.now())
    await _finish(term, finished)
    return ""


async def _finish(term: Term, step: int) -> None:
    epoch, claim = term.running, term.run_log.newest_claim
    entry = log.Done(epoch=epoch.number, token=epoch.token, step=step)
    while isinstance(lost := await term.persist(lambda: term.run_log.append(entry)), Lost):
        if lost.reason != "PlaceTaken" or term.run_log.newest_claim != claim:
            await fence.check_fence(term)
            return
    nothing = (
        "; there was nothing left to do: raise `until` of job.steps, or start another run "
        "(--run, checkpoint.run)"
    )
    text = f"trained to step {step}{nothing if epoch.resume >= step else ''}"
    planned_moves.withdraw_move(term, "")
    term.end(report.Cause.DONE, text, step=step)
