"""From a round to a claim. An epoch of new processes is claimed in the run log before its first step."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from everstep_agent.coordinator import claim_behind, rounds
from everstep_agent.coordinator.breaks import SILENT_SECONDS
from everstep_agent.coordinator.regroup_rules import note_commit
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.unfinished import finish_save
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog import run_log
from everstep_contract import levels, log, report

SAY_AGAIN_SECONDS = 60.0


@dataclass(slots=True)
class Round:
    """What the loop remembers between two turns."""

    number: int
    opened: float
    numbered_at: float
    """When the round was given its number."""
    heard: object = None
    """The newest claim, and which of its members have reported."""
    heard_at: float = 0.0
    said: rounds.Wait | None = None
    said_at: float = 0.0

    def hear(self, heard: object, now: float) -> bool:
        """Whether to wait longer for members that have not reported; each new report extends the
        wait for the rest.
        """
        if heard != self.heard:
            self.heard, self.heard_at = heard, now
        return now - self.heard_at < SILENT_SECONDS


async def gather(term: Term, cause: str) -> EpochLevel | None:
    """Gather members and claim the next epoch. Returns None if the job ends, if this pod no longer
    belongs to the job, or if workers of an epoch that this coordinator did not know of are alive;
    in the last case `term` then holds that epoch.
    """
    number = rounds.next_number(log_epoch(term), term.reports.all(), term.state.burnt)
    turn = Round(number=number, opened=term.now(), numbered_at=term.now())
    term.change(term.state.open_round(number))
    while not term.ended:
        if term.wanted.stop is not levels.Stop.NONE or term.wanted.leave:
            # A coordinator that was suspended for a while must not decide while a pod may hold
            # steps of a newer epoch.
            await term.persist(term.run_log.refresh)
        term.note_left()
        if _adopt(term) or _ends_here(term, turn):
            return None
        if not term.hands_over:
            claimed = await _try_to_claim(term, turn, cause)
            if claimed is not None or term.ended:
                return claimed
            _renew(term, turn)
        await term.tick()
    return None


async def _try_to_claim(term: Term, turn: Round, cause: str) -> EpochLevel | None:
    decision = _decide(term, turn)
    if isinstance(decision, rounds.Start):
        await finish_save(term)
        if term.ended:
            return None
        claimed = await _claim(term, turn, cause)
        if isinstance(claimed, EpochLevel) or term.ended:
            return claimed if isinstance(claimed, EpochLevel) else None
        decision = claimed
    _say(term, turn, decision)
    return None


def _decide(term: Term, turn: Round) -> rounds.Decision:
    return rounds.decide_epoch(
        term.recent(),
        term.wanted,
        round=turn.number,
        waited=term.now() - turn.opened,
        gang=term.settings.gang_seconds,
        former=_list_former(term),
        mesh=term.settings.mesh,
    )


def _list_former(term: Term) -> frozenset[tuple[int, int]]:
    claim = term.run_log.newest_claim
    if claim is None or claim.job_uid != term.settings.job_uid:
        return frozenset()
    return frozenset((m.slot, m.attempt) for m in claim.members)


def _say(term: Term, turn: Round, wait: rounds.Wait) -> None:
    """Logs each new reason at once, and a changed message with the same reason only from time to
    time.
    """
    news = turn.said is None or wait.reason != turn.said.reason
    again = turn.said is not None and wait.message != turn.said.message
    if news or (again and term.now() - turn.said_at > SAY_AGAIN_SECONDS):
        turn.said, turn.said_at = wait, term.now()
        term.line.say("round_waits", round=turn.number, reason=wait.reason, message=wait.message)


def _renew(term: Term, turn: Round) -> None:
    """Gives up a round number that is used up, that a member of a later round will never join, or
    that did not start within `startup_seconds`; all join the next one.
    """
    if term.now() - turn.numbered_at > term.settings.startup_seconds:
        term.line.say("round_burnt", round=turn.number, seconds=term.settings.startup_seconds)
        term.change(term.state.burn_round(turn.number))
    newer = rounds.choose_number(turn.number, log_epoch(term), term.reports.all(), term.state.burnt)
    if newer != turn.number:
        turn.number, turn.numbered_at = newer, term.now()
        term.change(term.state.open_round(newer))


def _adopt(term: Term) -> bool:
    """Adopts an epoch whose workers are alive although this coordinator did not know of it, or
    although a newer claim continues it. Their state may exist nowhere else, so it is recovered
    first.
    """
    held = rounds.find_unheard(term.recent(), term.epoch, term.run_log.newest_claim)
    if held is None:
        return False
    adopt(term, held)
    return True


def adopt(term: Term, held: EpochLevel) -> None:
    """Take up the epoch that living workers are in."""
    term.line.say("epoch_adopted", epoch=held.number, incident=term.state.incidents.id)
    term.change(term.state.adopt_epoch(note_commit(held, term.newest_commit())))
    claim_behind.start(term)


def log_epoch(term: Term) -> int:
    """The highest epoch number in the log, or the running epoch's, which may step before its claim."""
    running = term.epoch.number if term.epoch is not None else 0
    return max(running, term.run_log.index.next_epoch - 1)


def _ends_here(term: Term, turn: Round) -> bool:
    """End the job where this needs no epoch: after a failure that an agent found by itself, or on a
    stop when no member can hold unsaved state.
    """
    unheard = term.list_unheard()
    spoken = rounds.list_reported(unheard, term.reports.all())
    patient = turn.hear((term.run_log.newest_claim, spoken), term.now())
    found = next((r.failure for r in term.reports.all() if r.failure is not None), None)
    if found is not None:
        cause = report.Cause(found.cause)
        term.end(cause, found.message, step=found.step, traceback=found.traceback)
        return True
    if term.wanted.stop is not levels.Stop.NONE and not (unheard and patient):
        stop_here(term)
        return True
    return False


def stop_here(term: Term) -> None:
    commit = term.newest_commit()
    epoch, step = (commit.epoch, commit.step) if commit else (0, 0)
    term.change(term.state.stop(levels.Stopped(epoch=epoch, step=step)))
    what = f"the checkpoint of step {step} is committed" if commit else "no step was trained"
    term.end(report.Cause.STOPPED, f"stopped on request; {what}", step=step)


async def _claim(term: Term, turn: Round, cause: str) -> EpochLevel | rounds.Wait:
    await claim_behind.settle(term)
    await term.persist(term.run_log.refresh)
    if lost := _why_unreadable(term):
        term.end(report.Cause.STORE, lost)
        return rounds.Wait(reason="Unreadable", message=lost)
    start = _decide(term, turn)  # again, because a save or the store may have taken long
    if isinstance(start, rounds.Wait):
        return start
    number, known, commit = turn.number, len(term.run_log.index), term.newest_commit()
    claim = _judge(term, number, start, cause)
    if isinstance(claim, rounds.Wait):
        return claim
    outcome = await term.persist(lambda: term.run_log.append(claim, after=known))
    if isinstance(outcome, run_log.Lost):
        term.change(term.state.burn_round(number))
        return rounds.Wait(reason=outcome.reason, message=outcome.message)
    if overtaken := runlog_rules.why_overtaken(claim, term.run_log.newest_claim):
        term.change(term.state.burn_round(number))
        return rounds.Wait(reason="Overtaken", message=overtaken)
    return _begin_epoch(term, claim, start, commit)


def _why_unreadable(term: Term) -> str:
    """Why the run cannot be continued although it has checkpoints; empty: it can. To begin again at
    step 0 would give all of them up, and they may only need another version, or a repaired store.
    """
    if term.newest_commit() is not None or term.run_log.index.newest_resumable is None:
        return ""
    first, *more = term.state.broken.values()
    return (
        f"none of the run's checkpoints can be read: {first}"
        + (f" (and {len(more)} more)" if more else "")
        + ". None was deleted: repair the store, use the version of Everstep that wrote them, or start"
        " another run (checkpoint.run, --run)"
    )


def _judge(term: Term, number: int, start: rounds.Start, cause: str) -> log.Claim | rounds.Wait:
    """The claim, if the log as read just now allows it."""
    chain = runlog_rules.chain_of(term.run_log.claims, term.newest_commit())
    return judge_claim(term, term.run_log.claims, number, start.members, chain, cause)


def judge_claim(
    term: Term,
    claims: Sequence[log.Claim],
    number: int,
    members: Sequence[EpochMember],
    chain: tuple[log.ChainLink, ...],
    cause: str,
    *,
    token: str = "",
) -> log.Claim | rounds.Wait:
    """The claim of an epoch of these members, if `claims` allow it. `claims`: those in the log as
    read, and those that are to be appended before this one.
    """
    newest = claims[-1] if claims else None
    ids = tuple(i for m in members for i in m.ids())
    proof = rounds.build_proof(newest, term.reports.all(), term.wanted, term.list_yields())
    verdict = runlog_rules.may_claim(claims, ids, proof, job_uid=term.settings.job_uid)
    if verdict.reason == "Fenced":
        term.end(report.Cause.FENCED, verdict.message)
    if not verdict.ok:
        return rounds.Wait(reason=verdict.reason, message=verdict.message)
    if number <= log_epoch(term):
        return rounds.Wait(reason="NumberUsed", message=f"epoch {number} was used in the meantime")
    strike = term.state.strike
    return log.Claim(
        epoch=number,
        token=token or secrets.token_hex(16),
        members=ids,
        coordinator=term.me.address,
        job_uid=term.settings.job_uid,
        job=term.settings.job,
        chain=runlog_rules.shorten_chain(chain, term.run_log.index.first_steps()),
        left_out=runlog_rules.build_left_out(newest, ids, proof),
        cause=cause,
        failed=strike.step if strike.cause == cause else 0,
        fault=strike.fault if strike.cause == cause else "",
        incident=term.state.incidents.id,
    )


def _begin_epoch(
    term: Term, claim: log.Claim, start: rounds.Start, commit: log.Commit | None
) -> EpochLevel:
    term.group.open_epoch(claim.epoch)
    resume = commit.step if commit else 0
    state = term.state
    epoch = EpochLevel(
        number=claim.epoch,
        token=claim.token,
        stage=Stage.STARTING,
        members=start.members,
        mesh=term.settings.mesh,
        commit=commit,
        started_world=sum(len(m.ranks) for m in start.members),
        committed=resume,
        save_every_steps=term.wanted.save_every_steps,
        guard_factor=term.settings.guard_factor,
        guard_action=term.settings.guard_action,
        generation=term.wanted.generation,
        incident=state.incidents.id,
        store=term.me.address,
    )
    term.saves.restart(claim.epoch, resume)
    state = state.with_incidents(state.incidents.take_rung("restart"))  # a regroup may have failed
    if state.epoch is None:  # only now is it known how far the replaced pods had come
        former = term.run_log.claims[-2].epoch if len(term.run_log.claims) > 1 else 0
        lost = rounds.count_lost(term.reports.all(), former, resume)
        state = state.with_incidents(state.incidents.resumes(resume, lost))
    term.line.say(
        "epoch_claimed",
        epoch=claim.epoch,
        slots=",".join(str(m.slot) for m in start.members),
        world=epoch.world,
        resume=resume,
        cause=claim.cause,
        incident=state.incidents.id,
        message=start.message,
    )
    term.change(state.mark("regroup", term.now()).begin_epoch(epoch))
    return epoch
