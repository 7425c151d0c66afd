"""From a round to a claim: every epoch is claimed in the run log before its first step, and its
members are new lives.
"""

import secrets
import time
from dataclasses import replace

from everstep_agent import rounds, runlog, runlog_rules
from everstep_agent.breaks import SILENT_SECONDS
from everstep_agent.desk import STALE_SECONDS, Desk
from everstep_agent.messages import EpochLevel, Stage
from everstep_contract import levels, log, report

SAY_AGAIN_SECONDS = 60.0


async def gather(desk: Desk, cause: str) -> EpochLevel | None:
    """The next epoch, claimed. None: the job ends, this coordinator has no say any more, or workers
    of an epoch of which it had not heard still live: that one is the desk's then.
    """
    number = rounds.next_number(_log_epoch(desk), desk.reports.all(), desk.burnt)
    opened, said = time.monotonic(), ("", "", 0.0)
    known, known_since = None, opened
    desk.publish(round=number)
    while not desk.ended:
        if desk.wanted.stop is not levels.Stop.NONE or desk.wanted.leave:
            # Who stood still for a while must not speak for a pod that has a newer epoch's steps.
            await desk.persist(desk.run_log.refresh)
        desk.note_left()
        unheard = desk.list_unheard()
        newly = desk.run_log.newest_claim, rounds.list_spoken(unheard, desk.reports.all())
        if newly != known:  # who speaks at last is given time for the rest
            known, known_since = newly, time.monotonic()
        patient = time.monotonic() - known_since < SILENT_SECONDS
        if _adopt(desk) or _ends_here(desk, stop=not (unheard and patient)):
            return None
        if desk.hands_over:
            await desk.tick()
            continue
        now = time.monotonic()
        decision = rounds.decide_epoch(
            desk.reports.recent(now, STALE_SECONDS),
            desk.wanted,
            round=number,
            waited=now - opened,
            gang=desk.settings.gang_seconds,
        )
        if isinstance(decision, rounds.Start):
            claimed = await _claim(desk, number, decision, cause)
            if isinstance(claimed, EpochLevel):
                return claimed
            if desk.ended:
                return None
            decision = claimed
        again = decision.message != said[1] and now - said[2] > SAY_AGAIN_SECONDS
        if decision.reason != said[0] or again:
            said = (decision.reason, decision.message, now)
            desk.line.say(
                "round_waits", round=number, reason=decision.reason, message=decision.message
            )
        newer = rounds.choose_number(number, _log_epoch(desk), desk.reports.all(), desk.burnt)
        if newer != number:
            number = newer
            desk.publish(round=number)
        await desk.tick()
    return None


def _adopt(desk: Desk) -> bool:
    """What living workers of an unheard epoch hold may stand nowhere else: it is recovered first."""
    recent = desk.reports.recent(time.monotonic(), STALE_SECONDS)
    held = rounds.find_unheard(recent, desk.epoch, desk.run_log.newest_claim)
    if held is None:
        return False
    desk.line.say("epoch_adopted", epoch=held.number, incident=desk.incidents.id)
    desk.publish(round=0, epoch=replace(held, boundary=None))
    return True


def _log_epoch(desk: Desk) -> int:
    return runlog_rules.next_epoch(desk.run_log.entries) - 1


def _ends_here(desk: Desk, *, stop: bool) -> bool:
    """Ends that need no epoch: a failure that an agent found by itself, or a stop, once nobody can hold
    what would have to be saved first.
    """
    failed = next((r for r in desk.reports.all() if r.failure is not None), None)
    if failed is not None and failed.failure is not None:
        found = failed.failure
        desk.end(
            report.Cause(found.cause), found.message, step=found.step, traceback=found.traceback
        )
        return True
    if stop and desk.wanted.stop is not levels.Stop.NONE:
        stop_here(desk)
        return True
    return False


def stop_here(desk: Desk) -> None:
    commit = desk.newest_commit()
    epoch, step = (commit.epoch, commit.step) if commit else (0, 0)
    desk.stopped = levels.Stopped(epoch=epoch, step=step)
    what = f"the checkpoint of step {step} is committed" if commit else "nothing was trained yet"
    desk.end(report.Cause.STOPPED, f"stopped on request; {what}", step=step)


async def _claim(
    desk: Desk, number: int, start: rounds.Start, cause: str
) -> EpochLevel | rounds.Wait:
    await desk.persist(desk.run_log.refresh)
    known = len(desk.run_log.entries)
    newest = desk.run_log.newest_claim
    ids = tuple(i for m in start.members for i in m.ids())
    proof = rounds.build_proof(newest, desk.reports.all(), desk.wanted)
    verdict = runlog_rules.may_claim(desk.run_log.claims, ids, proof, job_uid=desk.settings.job_uid)
    if verdict.reason == "Fenced":
        desk.end(report.Cause.FENCED, verdict.message)
    if not verdict.ok:
        return rounds.Wait(reason=verdict.reason, message=verdict.message)
    if number <= _log_epoch(desk):
        return rounds.Wait(reason="NumberUsed", message=f"epoch {number} was used meanwhile")
    commit = desk.newest_commit()
    claim = log.Claim(
        epoch=number,
        token=secrets.token_hex(16),
        members=ids,
        coordinator=desk.me.address,
        job_uid=desk.settings.job_uid,
        job=desk.settings.job,
        chain=runlog_rules.chain_of(desk.run_log.claims, commit),
        left_out=runlog_rules.build_left_out(newest, ids, proof),
        cause=cause,
        failed=desk.struck[1] if desk.struck[0] == cause else 0,
        incident=desk.incidents.id,
    )
    outcome = await desk.persist(lambda: desk.run_log.append(claim, after=known))
    if isinstance(outcome, runlog.Lost):
        desk.burnt = number
        return rounds.Wait(reason=outcome.reason, message=outcome.message)
    if overtaken := runlog_rules.why_overtaken(claim, desk.run_log.newest_claim):
        desk.burnt = number
        return rounds.Wait(reason="Overtaken", message=overtaken)
    return _open_epoch(desk, claim, start, commit)


def _open_epoch(
    desk: Desk, claim: log.Claim, start: rounds.Start, commit: log.Commit | None
) -> EpochLevel:
    desk.group.open_epoch(claim.epoch)
    resume = commit.step if commit else 0
    epoch = EpochLevel(
        number=claim.epoch,
        token=claim.token,
        stage=Stage.STARTING,
        members=start.members,
        commit=commit,
        committed=resume,
        save_every_steps=desk.wanted.save_every_steps,
        incident=desk.incidents.id,
    )
    desk.saves.drop_older(claim.epoch, resume)
    if desk.incidents.current is not None and desk.epoch is None:
        former = desk.run_log.claims[-2].epoch if len(desk.run_log.claims) > 1 else 0
        lost = rounds.count_lost(desk.reports.all(), former, resume)
        desk.incidents.current = desk.incidents.current.resumes(resume, lost)
    desk.incidents.mark("regroup", time.monotonic())
    desk.line.say(
        "epoch_claimed",
        epoch=claim.epoch,
        slots=",".join(str(m.slot) for m in start.members),
        world=epoch.world,
        resume=resume,
        cause=claim.cause,
        incident=desk.incidents.id,
        message=start.message,
    )
    desk.publish(round=0, epoch=epoch)
    return epoch
