"""After a break: cut the process group, find the furthest step, have its state saved and committed,
and end the old workers.
"""

import asyncio
import contextlib
import math
from collections.abc import Collection, Sequence

from everstep_agent.coordinator import breaks, members, postmortem, rounds, unfinished
from everstep_agent.coordinator.breaks import (
    ENDS_THE_JOB,
    REPLICAS_DIFFER,
    SILENT_SECONDS,
    Break,
)
from everstep_agent.coordinator.incidents import Cause
from everstep_agent.coordinator.regroup_rules import note_commit
from everstep_agent.coordinator.step_first_rules import list_pending
from everstep_agent.coordinator.term import STALE_SECONDS, Term
from everstep_agent.peers.epoch_level import Id, Saver
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.storage.errors import StoreError
from everstep_contract import report

CAUSE_SECONDS = 1.0
"""How long to look for the death that broke a group; a wait status arrives within 64 ms (measured).
"""
DRAIN_SECONDS = 10.0
"""Limit for committing complete saves of an epoch whose members are all dead, if one of their
agents is silent; if all report, the limit is `drain_seconds`.
"""
LOOK_SECONDS = 2.0
"""Limit for one read of the log, and the time between two reads while a save is awaited."""
_GO_BACK = frozenset({"CheckpointBroken", REPLICAS_DIFFER})
"""Causes whose own message says why a step is lost."""
CODE_OR_DATA = frozenset(c.value for c in report.CODE_OR_DATA)


async def recover(term: Term, found: Break) -> str:
    """End the epoch without losing any state that a living rank holds. Returns the cause; may end
    the job.
    """
    cut_at = term.now()
    if found.cause not in ENDS_THE_JOB:
        term.open_incident(cause_of(found))
    incidents = term.state.incidents.detect(cut_at - found.dead_ms / 1000, cut_at)
    term.line.say("epoch_breaks", cause=found.cause, message=found.text, incident=incidents.id)
    term.group.open_epoch(0)
    term.change(term.state.with_incidents(incidents).cut_epoch(found.cause))
    _write_as_successor(term)
    stood, found = await _post_mortem(term, found, cut_at)
    await _look_at_log(term)
    _settle(term, found, stood)
    if not term.ended:
        term.change(term.state.end_epoch(found.cause))
    return found.cause


def _write_as_successor(term: Term) -> None:
    """Commit under the claim of an epoch that continues this one, if there is one. A coordinator
    may have been lost after it claimed such an epoch and before it published it. Then that claim is
    the newest, so what is saved here must be committed under it.
    """
    epoch, newest = term.running, term.run_log.newest_claim
    members = {i for m in epoch.members for i in m.ids()}
    found = runlog_rules.find_successor(newest, epoch.number, members, term.settings.job_uid)
    if found is not None:
        term.change(term.state.write_as(found.token))


def cause_of(found: Break) -> Cause:
    return Cause(name=found.cause, message=found.text, slots=found.slots, rank=found.rank)


async def _post_mortem(term: Term, found: Break, cut_at: float) -> tuple[postmortem.Nothing, Break]:
    """Have the state saved. Returns the step that the run had reached with the reason why nobody
    saves it (any more), and the cause as known by then.
    """
    said = ""
    while True:
        now = term.now()
        found = refine(term, found, now, now - cut_at)
        # No rank runs any more: the decision below is made after every living member has stopped.
        term.pump({})
        match _decide(term, now, now - cut_at):
            case Saver() as saver:
                _have_saved(term, saver)
            case postmortem.Nothing() as nothing:
                if found.certain or now - cut_at > CAUSE_SECONDS:
                    if term.saves.disagreement is None:
                        await _drain(term)
                    return nothing, found
            case postmortem.Wait() as wait:
                if wait.message != said:
                    said = wait.message
                    term.line.say("post_mortem_waits", message=said)
        await term.tick()


def _decide(term: Term, now: float, waited: float) -> postmortem.Decision:
    epoch = term.running
    ranks = postmortem.list_ranks(
        epoch.members,
        term.reports.aged(now),
        epoch=epoch.number,
        stale=STALE_SECONDS,
        gone=term.state.gone,
    )
    _end_hopeless(term, ranks)
    unsaved = members.list_unsaved(epoch, term.reports.all()) | term.saves.unsaved(epoch.number)
    if term.saves.disagreement is not None:  # nobody's state may be saved
        unsaved = {rank for member in epoch.members for rank in member.ranks.values()}
    return postmortem.decide_post_mortem(
        ranks,
        committed=epoch.committed,
        waited=waited,
        patience=SILENT_SECONDS,
        failed=frozenset(unsaved),
        ended=term.running.ended,
        mesh=epoch.mesh,
    )


def _end_hopeless(term: Term, ranks: Sequence[postmortem.Rank]) -> None:
    ended = {*term.running.ended, *postmortem.list_hopeless(ranks, term.running.mesh)}
    if ended != {*term.running.ended}:
        term.change(term.state.end_ranks(tuple(sorted(ended))))


def _have_saved(term: Term, saver: Saver) -> None:
    if term.saves.has_whole(term.running, saver.step):
        term.mark("save")
    elif saver != term.running.saver:
        term.change(term.state.choose_saver(saver))
        ranks = ",".join(map(str, term.running.savers))
        term.line.say("post_mortem_save", rank=ranks, step=saver.step)


def refine(
    term: Term, found: Break, now: float, waited: float, given_up: Collection[Id] = ()
) -> Break:
    """The break, with its cause as known by now. A death reported only after the group broke is its
    cause; a second death belongs to the same break. If no death is known, the same holds for a
    silent member that is `given_up`: the others may continue without it.
    """
    known = breaks.list_breaks(
        term.running,
        term.reports.aged(now),
        term.wanted,
        idle=waited,
        hang=term.settings.hang_seconds,
        outvoted=given_up,
    )
    better = breaks.explain(found, known)
    if better == found:
        return found
    since = now - better.dead_ms / 1000 if not found.certain else None
    incidents = term.state.incidents.explain(cause_of(better), since)
    term.change(term.state.with_incidents(incidents))
    term.line.say("break_explained", cause=better.cause, message=better.text, incident=incidents.id)
    return better


async def _drain(term: Term) -> None:
    """Wait for the complete saves that the agents of dead workers still hold, their own parts or
    copies of others', until these are committed by this coordinator or by another.
    """
    try:
        await _drain_within_limits(term)
    finally:
        term.change(term.state.finish_save(None))


async def _drain_within_limits(term: Term) -> None:
    began, said, looked = term.now(), 0, -math.inf
    while True:
        epoch = note_commit(term.running, term.newest_commit())
        heard = {r.id for r in term.recent()}
        whole = _have_uploaded(term)
        all_there = whole or heard.issuperset(m.id for m in epoch.members)
        if term.now() > began + (term.settings.drain_seconds if all_there else DRAIN_SECONDS):
            return
        newest = max(_find_awaited(term), whole)
        if newest <= epoch.committed and not term.saves.busy:
            if term.now() > began + LOOK_SECONDS or _have_looked(term):
                return
            await term.tick()
            continue
        if term.now() > looked + LOOK_SECONDS:
            looked = term.now()
            await _look_at_log(term)
            continue
        if newest > max(said, epoch.committed):
            term.line.say("save_awaited", step=newest)
            said = newest
        term.pump({})
        await term.tick()


def _find_awaited(term: Term) -> int:
    """The newest step whose parts the agents of dead workers may still upload; 0: none. A step that all have reached
    lacks a part if one of them had no room for it.
    """
    epoch = term.running
    newest = members.find_complete(epoch, term.reports.all())
    if not term.saves.why_given_up(epoch.number, newest):
        return newest
    return max((s for s in term.saves.pending(epoch.number) if s < newest), default=0)


def _have_uploaded(term: Term) -> int:
    """Ask the agents to upload the newest save that they can complete, including near saves and
    copies of lost pods' parts. Returns its step; 0: there is none.
    """
    found = unfinished.find_save(term)
    if found is None or term.saves.why_given_up(found[0].number, found[1]):
        return 0
    level, step = found
    if term.state.unfinished != level:
        term.line.say("save_unfinished", epoch=level.number, step=step)
        term.change(term.state.finish_save(level))
    return step


def _have_looked(term: Term) -> bool:
    """Whether each member's agent that answers has reported what it holds of this epoch."""
    epoch = term.running
    told = [r for r in term.recent() if epoch.member(*r.id) is not None]
    return all(r.unsent_of == epoch.number or r.epoch != epoch.number for r in told)


async def _look_at_log(term: Term) -> None:
    """Read the log: if an unreachable member has committed its state, those steps are not lost."""
    with contextlib.suppress(StoreError, TimeoutError):
        async with asyncio.timeout(LOOK_SECONDS):
            await term.run_log.refresh()


def _settle(term: Term, found: Break, stood: postmortem.Nothing) -> None:
    """Count and report the lost steps, and end the job if the cause requires it."""
    if found.cause == "CheckpointBroken" and term.running.commit:
        broken = term.running.commit.manifest
        term.change(term.state.pass_over(broken, found.text).note(found.text))
    commit = term.newest_commit()
    step = commit.step if commit else 0
    lost = max(0, stood.target - step)
    if lost and found.cause not in _GO_BACK:
        term.change(term.state.note(f"{stood.message}; going back to step {step}"))
    incidents = term.state.incidents.mark("commit", term.now()).resumes(step, lost)
    term.change(term.state.with_incidents(incidents))
    term.line.say("resume_point", step=step, steps_lost=lost, incident=incidents.id)
    if found.cause in ENDS_THE_JOB:
        at = found.failure.step if found.failure else step
        _fail(term, report.Cause(found.cause), found.text, found, at)
        return
    at = found.failure.step if found.failure else stood.target
    count_repeats(term, found, (step if found.cause == REPLICAS_DIFFER else at) + 1)


def is_last_try(term: Term, found: Break, step: int) -> bool:
    """Whether `count_repeats` would end the job because of a fault of code or data."""
    return (
        found.cause in CODE_OR_DATA
        and _count_before(term, found, step) + 1 >= report.SAME_FAULT_LIMIT
    )


def _count_before(term: Term, found: Break, step: int) -> int:
    claims = (*term.run_log.claims, *list_pending(term.running, term.run_log.index))
    return rounds.count_repeats(claims, found.cause, step, found.fault)


def count_repeats(term: Term, found: Break, step: int) -> None:
    """Count repetitions of this fault, and end the job if there are too many. The same crash or
    exception in the same step, again and again, is a fault of code or data that no restart repairs.

    Any other cause is left to the restart budgets: an infrastructure fault that stops all progress
    also hits the same step each time.
    """
    before = _count_before(term, found, step)
    term.change(term.state.strike_step(found.cause, step, found.fault))
    if before + 1 >= report.SAME_FAULT_LIMIT and found.cause in CODE_OR_DATA:
        what = f"{found.cause} ({found.fault})" if found.fault else found.cause
        text = (
            f"step {step} failed {before + 1} times with {what}: likely code or data;"
            f" the last time: {found.text}"
        )
        _fail(term, report.Cause.USER_ERROR, text, found, step)
    if before + 1 >= report.SAME_FAULT_LIMIT and found.cause == REPLICAS_DIFFER:
        text = (
            f"the ranks differed {before + 1} times after step {step - 1}: likely state that each rank "
            f"has for itself, or a computation that differs between ranks; the last time: {found.text}"
        )
        _fail(term, report.Cause.USER_ERROR, text, found, step - 1)
    if before + 1 >= report.SAME_FAULT_LIMIT and found.cause == breaks.SAVE_LOST:
        text = f"the state of step {step - 1} could not be saved {before + 1} times: {found.text}"
        _fail(term, report.Cause.STORE, text, found, step - 1)


def _fail(term: Term, cause: report.Cause, text: str, found: Break, step: int) -> None:
    trace = found.failure.traceback if found.failure else ""
    term.end(cause, text, rank=found.rank, step=step, traceback=trace)
