"""After a break: cut, find out who holds the position, have it saved, commit; then the old workers
end.
"""

import asyncio
import contextlib
import time
from dataclasses import replace

from everstep_agent import breaks, postmortem, rounds
from everstep_agent.breaks import ENDS_THE_JOB, SILENT_SECONDS, Break
from everstep_agent.desk import STALE_SECONDS, Desk
from everstep_agent.messages import Saver, Stage
from everstep_agent.storage.errors import StoreError
from everstep_contract import report

CAUSE_SECONDS = 1.0
"""How long a broken group is watched for the death that broke it; a wait status comes within 64 ms
(measured).
"""
DRAIN_SECONDS = 10.0
"""How long complete saves of an epoch whose members are all dead may still take to be committed
when one of their agents is silent; with all of them there it is `drain_seconds`.
"""
LOOK_SECONDS = 2.0
TRIES = 3
INFRASTRUCTURE = frozenset({"AgentLost", "Gone", "CoordinatorLost", "CheckpointBroken"})
"""Causes that say nothing against the user's code, however often they come."""


async def recover(desk: Desk, found: Break) -> str:
    """Bring the epoch to its end with nothing lost that a living rank holds. Returns the cause; may
    end the job.
    """
    cut_at = time.monotonic()
    if found.cause not in ENDS_THE_JOB:
        desk.incidents.open(
            desk.new_incident(),
            found.cause,
            found.text,
            now=cut_at,
            slots=found.slots,
            rank=found.rank,
        )
    desk.line.say("epoch_breaks", cause=found.cause, message=found.text, incident=desk.incidents.id)
    _detected(desk, found, cut_at)
    desk.group.open_epoch(0)
    desk.set_epoch(
        stage=Stage.CUT, boundary=None, saver=None, cause=found.cause, incident=desk.incidents.id
    )
    target, found = await _post_mortem(desk, found, cut_at)
    await _look_at_log(desk)
    _settle(desk, found, target)
    if not desk.ended:
        desk.set_epoch(stage=Stage.OVER, saver=None, cause=found.cause)
    return found.cause


def _detected(desk: Desk, found: Break, now: float) -> None:
    """The phase `detect` begins when the death was noticed by the worker's parent."""
    current = desk.incidents.current
    if current is not None and not current.level.phases:
        desk.incidents.current = replace(current, since=now - found.dead_ms / 1000)
    desk.incidents.mark("detect", now)


async def _post_mortem(desk: Desk, found: Break, cut_at: float) -> tuple[int, Break]:
    """The step where the run stood, and the cause as it is known by then."""
    said = ""
    while True:
        now = time.monotonic()
        found = _refine(desk, found, now, now - cut_at)
        epoch = desk.epoch
        assert epoch is not None
        # Nobody runs any more: the decision below has seen every living member stop.
        desk.saves.pump(epoch, {}, desk.seconds())
        decision = postmortem.decide_post_mortem(
            postmortem.list_ranks(
                epoch.members,
                desk.reports.aged(now),
                epoch=epoch.number,
                stale=STALE_SECONDS,
                gone=desk.gone,
            ),
            committed=epoch.committed,
            waited=now - cut_at,
            patience=SILENT_SECONDS,
            failed=_list_unsaved(desk),
        )
        match decision:
            case Saver():
                if decision != epoch.saver:
                    desk.line.say("post_mortem_save", rank=decision.rank, step=decision.step)
                    desk.set_epoch(saver=decision)
                if desk.saves.has_whole(epoch.number, decision.step):
                    desk.incidents.mark("save", now)
            case postmortem.Nothing():
                if found.certain or now - cut_at > CAUSE_SECONDS:
                    await _drain(desk)
                    return decision.target, found
            case postmortem.Wait():
                if decision.message != said:
                    said = decision.message
                    desk.line.say("post_mortem_waits", message=said)
        await desk.tick()


def _list_unsaved(desk: Desk) -> frozenset[int]:
    """Ranks whose own save came to nothing: by their agents' word, or because nobody could commit it."""
    assert desk.epoch is not None
    epoch, found = desk.epoch, set(desk.saves.unsaved(desk.epoch.number))
    for held in desk.reports.all():
        member = epoch.member(*held.id)
        if member is not None and held.epoch == epoch.number:
            base = member.node_rank * len(member.lives)
            found |= {base + w.local for w in held.workers if w.unsaved}
    return frozenset(found)


def _refine(desk: Desk, found: Break, now: float, waited: float) -> Break:
    """A death that shows only after the group broke is its cause; a second one belongs to it."""
    assert desk.epoch is not None
    known = breaks.list_breaks(
        desk.epoch,
        desk.reports.aged(now),
        desk.wanted,
        idle=waited,
        hang=desk.settings.hang_seconds,
    )
    better = breaks.explain(found, known)
    if better == found:
        return found
    current = desk.incidents.current
    if current is not None:
        if not found.certain:
            current = current.begin(now - better.dead_ms / 1000)
        desk.incidents.current = current.explain(
            better.cause, better.text, better.slots, better.rank
        )
    desk.line.say(
        "break_explained", cause=better.cause, message=better.text, incident=desk.incidents.id
    )
    return better


async def _drain(desk: Desk) -> None:
    """What was staged whole by the dead lives on in their agents: let it be committed."""
    began = time.monotonic()
    while True:
        epoch, now = desk.epoch, time.monotonic()
        assert epoch is not None
        heard = {r.id for r in desk.reports.recent(now, STALE_SECONDS)}
        all_there = heard.issuperset(m.id for m in epoch.members)
        if now > began + (desk.settings.drain_seconds if all_there else DRAIN_SECONDS):
            return
        staged = [r.staged for r in desk.reports.all() if r.epoch == epoch.number]
        newest = min(staged, default=0) if len(staged) == len(epoch.members) else 0
        if newest <= epoch.committed and not desk.saves.busy:
            return
        desk.saves.pump(epoch, {}, desk.seconds())
        await desk.tick()


async def _look_at_log(desk: Desk) -> None:
    """A member that was out of reach may have committed what it held: then nothing of that is lost."""
    with contextlib.suppress(StoreError, TimeoutError):
        async with asyncio.timeout(LOOK_SECONDS):
            await desk.run_log.refresh()


def _settle(desk: Desk, found: Break, target: int) -> None:
    """Count what was lost, and end the job if the cause says so."""
    now = time.monotonic()
    if found.cause == "CheckpointBroken" and desk.epoch and desk.epoch.commit:
        desk.broken.add(desk.epoch.commit.manifest)
        desk.notes = (*desk.notes, found.text)[-3:]
    commit = desk.newest_commit()
    step = commit.step if commit else 0
    desk.incidents.mark("commit", now)
    lost = max(0, target - step)
    if desk.incidents.current is not None:
        desk.incidents.current = desk.incidents.current.resumes(step, lost)
    desk.line.say("resume_point", step=step, steps_lost=lost, incident=desk.incidents.id)
    failure = found.failure
    trace = failure.traceback if failure else ""
    if found.cause in ENDS_THE_JOB:
        at = failure.step if failure else step
        desk.end(report.Cause(found.cause), found.text, rank=found.rank, step=at, traceback=trace)
        return
    failed_in = (failure.step if failure else target) + 1
    desk.struck = found.cause, failed_in
    before = rounds.count_repeats(desk.run_log.claims, found.cause, failed_in)
    if before + 1 >= TRIES and found.cause not in INFRASTRUCTURE:
        text = (
            f"step {failed_in} failed {before + 1} times with {found.cause}: likely code or data;"
            f" the last time: {found.text}"
        )
        desk.end(report.Cause.USER_ERROR, text, rank=found.rank, step=failed_in, traceback=trace)
