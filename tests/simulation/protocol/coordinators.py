"""What a coordinator does next. The runtime's own functions decide; only the step from a decision
to its action is modelled here.
"""

from collections.abc import Iterator
from dataclasses import replace

from everstep_agent.checkpoint.commit_rules import decide_append
from everstep_agent.coordinator import postmortem, regroup_rules, rounds
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import EpochLevel, Saver, Stage
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog.log_index import LogIndex
from everstep_contract.log import Claim, Commit, Done, MemberId
from simulation.protocol import in_place, newcomers, step_first
from simulation.protocol.decisions import decide_saver, decide_start, find_cause
from simulation.protocol.log_moves import is_free, without, written
from simulation.protocol.orders import (
    halt,
    has_heard_all,
    let_go,
    must_leave,
    nobody_unheard,
    orders_heard,
    reaches,
    stopped,
    wanted_by,
)
from simulation.protocol.peers import follows, has_rival
from simulation.protocol.pods import build_gang, write_history
from simulation.protocol.rules import JOB, Move, Rules
from simulation.protocol.world import (
    IN,
    PARKED,
    Coordinator,
    History,
    World,
    build_report,
    is_over,
    keep,
    kept,
)


def hear(world: World, one: Coordinator) -> Iterator[Move]:
    if one.words < len(world.words):
        heard = world.with_coordinator(one._replace(words=len(world.words)))
        yield Move("hears the operator", one.place, None, heard)
    if world.stop and not one.stop:
        heard = world.with_coordinator(one._replace(stop=True))
        yield Move("hears of the stop", one.place, None, heard)
    if world.leave and one.leave is None:
        heard = world.with_coordinator(one._replace(leave=world.leave))
        yield Move("hears who is to leave", one.place, None, heard)
    if one.yields != world.yields:
        heard = world.with_coordinator(one._replace(yields=world.yields))
        yield Move("hears who may be left out", one.place, None, heard)
    for pod in world.pods:
        snap = pod.snap
        if snap not in one.view and follows(world, pod) == one.place:
            view = tuple(sorted([*(s for s in one.view if s[:2] != snap[:2]), snap]))
            yield Move(
                "hears", one.place, snap.place, world.with_coordinator(one._replace(view=view))
            )


def coordinate(world: World, one: Coordinator, rules: Rules) -> Iterator[Move]:
    if one.ended:
        return
    level = one.level
    if one.read < len(world.log) and one.owed is None and not world.away:
        yield Move("reads the log", one.place, None, _refreshed(world, one))
    if one.owed is not None:
        if not world.away:
            yield from _hear_of_claim(world, one, rules)
        return
    if level is not None and level.unclaimed:
        yield from step_first.claim_behind(world, one, level, rules)
    if _behind(world, one, rules) or has_rival(world, one):
        laid = world.without_coordinator(one.place)
        yield Move("lays the role down", one.place, None, laid)
    if one.saved is not None and _may_commit(world, level, rules):
        yield from _commit(world, one, rules)
    if one.leave is not None and one.leave not in world.words:
        yield from let_go(world, one, one.leave, rules)
    if is_over(level):
        yield from _gather(world, one, rules)
    elif level is not None and level.stage is Stage.CUT:
        yield from _recover(world, one, level, rules)
    elif level is not None and level.stage is Stage.HOLD:
        yield from in_place.go_on(world, one, level, rules)
    elif level is not None:
        yield from _watch(world, one, level, rules)


def _may_commit(world: World, level: EpochLevel | None, rules: Rules) -> bool:
    """As `Saves.pump`."""
    claimed = level is None or not level.unclaimed
    return not world.away and (claimed or not rules.commit_claimed)


def _behind(world: World, one: Coordinator, rules: Rules) -> bool:
    later = [_with_staged(build_report(s)) for s in one.view if s.epoch > one.number]
    if not later or not rules.leave_empty:
        return bool(later)
    newest = runlog_rules.newest_claim(world.entries(one.read))
    return rounds.is_behind(later, one.level, newest)


def _with_staged(report: AgentReport) -> AgentReport:
    """As if each rank had staged its state before it ended, which the model does not track."""
    return replace(report, staged=max((w.applied for w in report.workers), default=0))


def _refreshed(world: World, one: Coordinator) -> World:
    """The coordinator reads the new log entries. If they fence its gang, the gang ends."""
    after, level = one._replace(read=len(world.log)), one.level
    if level is not None and level.live:
        newest = runlog_rules.newest_claim(world.entries())
        if not runlog_rules.fenced(newest, build_gang(level)).ok:
            after = after._replace(ended="fenced")
    return world.with_coordinator(after)


# --- from a round to a claim ------------------------------------------------------------------------------


def _gather(world: World, one: Coordinator, rules: Rules) -> Iterator[Move]:
    known = world.entries(one.read)
    reports = [build_report(s) for s in one.view]
    newest = runlog_rules.newest_claim(known)
    held = rounds.find_unheard(reports, one.level, newest) if rules.catch_up else None
    if held is not None:
        if rules.know_commits:
            held = regroup_rules.note_commit(held, LogIndex(known).newest_resumable)
        cut = one._replace(round=0, kept=keep(replace(held, stage=Stage.CUT, saver=None)))
        yield Move("adopts an epoch", one.place, held.number, world.with_coordinator(cut))
        return
    if one.stop and (not rules.ask_first or nobody_unheard(world, one, reports, rules)):
        yield stopped(world, one)
        return
    last = LogIndex(known).next_epoch - 1
    number = rounds.choose_number(one.round, last, reports, one.burnt)
    if number != one.round:
        opened = world.with_coordinator(one._replace(round=number))
        yield Move("opens a round", one.place, number, opened)
        return
    former = frozenset((m.slot, m.attempt) for m in newest.members) if newest else frozenset()
    orders = orders_heard(world, one, rules)
    for waited in (0.0, 10.0):
        start = decide_start(one.view, orders, one.round, waited, former)
        if start is not None and not world.away and not (one.level and one.level.unclaimed):
            kind = "claims" if waited == 0 else "claims with fewer"
            yield from _claim(world, one, start, rules, kind)
            return


def _claim(
    world: World, one: Coordinator, start: rounds.Start, rules: Rules, kind: str
) -> Iterator[Move]:
    known = world.entries(one.read)
    claims = [e for e in known if isinstance(e, Claim)]
    ids = tuple(i for m in start.members for i in m.ids())
    reports = [build_report(s) for s in one.view]
    newest, wanted = claims[-1] if claims else None, wanted_by(world, one, rules)
    proof = rounds.build_proof(newest, reports, wanted, step_first.list_yields(world, one, rules))
    if rules.proof_needed and not runlog_rules.may_claim(claims, ids, proof, job_uid=JOB).ok:
        return
    entry, level = _build_epoch(world, one, start, ids)
    if not rules.claim_first:
        ahead = one._replace(round=0, kept=keep(level), owed=(keep(entry), keep(level)))
        yield Move("starts unclaimed", one.place, entry.epoch, world.with_coordinator(ahead))
        return
    if not is_free(world, one.read, rules):
        burnt = one._replace(read=len(world.log), burnt=one.round, round=0)
        yield Move("finds its place taken", one.place, one.read, world.with_coordinator(burnt))
        return
    log = written(world, one.read, keep(entry), rules)
    if not rules.entries_stay:
        log = (*(0 for _ in log[:-1]), log[-1]) if log[-1] == keep(entry) else log
    opened = one._replace(read=len(log), round=0, kept=keep(level))
    slots = tuple(m.slot for m in start.members)
    yield Move(
        f"{kind} {entry.epoch} of",
        one.place,
        slots,
        world._replace(log=log).with_coordinator(opened),
    )
    if "answer" in world.faults:
        unsure = one._replace(owed=(keep(entry), keep(level)), round=0)
        lost = world._replace(log=log, faults=without(world.faults, "answer"))
        yield Move("claims, unheard,", one.place, entry.epoch, lost.with_coordinator(unsure))


def _build_epoch(
    world: World, one: Coordinator, start: rounds.Start, ids: tuple[MemberId, ...]
) -> tuple[Claim, EpochLevel]:
    known = world.entries(one.read)
    commit = LogIndex(known).newest_resumable
    entry = Claim(
        epoch=one.round,
        token=f"{one.place[0]}.{one.place[1]}.{one.round}",
        members=ids,
        coordinator="",
        job_uid=JOB,
        job="ns/job",
        chain=runlog_rules.chain_of([e for e in known if isinstance(e, Claim)], commit),
    )
    level = EpochLevel(
        number=entry.epoch,
        token=entry.token,
        stage=Stage.RUNNING,
        members=start.members,
        commit=commit,
        committed=commit.step if commit else 0,
    )
    return entry, level


def _hear_of_claim(world: World, one: Coordinator, rules: Rules) -> Iterator[Move]:
    """The coordinator sends the claim again, and learns whether its own entry or another one has
    that place in the log.
    """
    assert one.owed is not None
    entry, level = one.owed
    settled = one._replace(owed=None, kept=level)
    if entry in world.log:
        newest = runlog_rules.newest_claim(world.entries(len(world.log)))
        claim = kept(entry)
        if rules.look_again and runlog_rules.why_overtaken(claim, newest):
            late = one._replace(owed=None, read=len(world.log), burnt=claim.epoch, round=0)
            late = _restarting(late)
            yield Move("finds its claim overtaken", one.place, None, world.with_coordinator(late))
            return
        found = world.with_coordinator(settled._replace(read=len(world.log)))
        yield Move("finds its claim", one.place, None, found)
    elif is_free(world, one.read, rules):
        log = written(world, one.read, entry, rules)
        after = world._replace(log=log).with_coordinator(settled._replace(read=len(log)))
        yield Move("claims at last", one.place, None, after)
    else:
        ended = one._replace(owed=None, read=len(world.log), ended="fenced")
        yield Move("was too late to claim", one.place, None, world.with_coordinator(ended))


def _restarting(one: Coordinator) -> Coordinator:
    """Cut the epoch if it was held: it cannot continue in place, so it is restarted."""
    level = one.level
    if level is None or level.stage is not Stage.HOLD:
        return one
    return one._replace(kept=keep(replace(level, stage=Stage.CUT)))


# --- saves ------------------------------------------------------------------------------------------------


def _commit(world: World, one: Coordinator, rules: Rules) -> Iterator[Move]:
    """Commit the complete save, even one that was staged under an older epoch, if the chain of the
    current claim contains it.
    """
    level = one.level
    assert level is not None
    assert one.saved is not None
    epoch, step, history, rank = one.saved
    entry = Commit(
        epoch=epoch,
        token=_token(world, one, level),
        step=step,
        manifest=f"{epoch}-{step}-{level.token}",
        digest=write_history(history),
    )
    known = world.entries(one.read)
    if entry in known:
        heard = world.with_coordinator(_committed(one, step))
        yield Move("finds its commit", one.place, step, heard)
        return
    verdict = decide_append(entry, LogIndex(known))
    if not rules.commit_claimed and level.unclaimed:
        verdict = replace(verdict, ok=True)
    if not verdict.ok and (rules.saves_on_chain or verdict.reason != "OffLineage"):
        unsaved = one.unsaved if rank is None else one.unsaved | {(epoch, rank)}
        refused = one._replace(saved=None, unsaved=unsaved)
        newest = LogIndex(known).newest_resumable
        if verdict.reason == "NotNewer" and newest is not None and rules.know_commits:
            refused = _committed(refused, newest.step)
        dropped = world.with_coordinator(refused)
        yield Move("drops a save", one.place, step, dropped)
        return
    if not is_free(world, one.read, rules):
        return  # the place is taken: it reads the log and decides again
    log = written(world, one.read, keep(entry), rules)
    after = world._replace(log=log)
    heard = after.with_coordinator(_committed(one._replace(read=len(log)), step))
    yield Move("commits", one.place, (epoch, step), heard)
    if "answer" in world.faults:
        lost = after._replace(faults=without(world.faults, "answer"))
        yield Move("commits, unheard,", one.place, (epoch, step), lost)


def _token(world: World, one: Coordinator, level: EpochLevel) -> str:
    """As `recover._write_as_successor`."""
    newest = runlog_rules.newest_claim(world.entries(one.read))
    ids = {i for m in level.members for i in m.ids()}
    found = runlog_rules.find_successor(newest, level.number, ids, JOB)
    return found.token if found is not None and level.stage is Stage.CUT else level.token


def _committed(one: Coordinator, step: int) -> Coordinator:
    level = one.level
    assert level is not None
    return one._replace(kept=keep(replace(level, committed=max(step, level.committed))), saved=None)


def _stage(world: World, one: Coordinator, level: EpochLevel) -> Iterator[Move]:
    """A save is complete once all parts of its step are there."""
    if one.saved is not None:
        return
    snaps = [s for s in one.view if s.epoch == level.number]
    held = min((s.step for s in snaps), default=0)
    if len(snaps) < len(level.members) or held <= level.committed:
        return
    history = _history_of(world, level, held)
    if history is not None:
        staged = world.with_coordinator(one._replace(saved=(level.number, held, history, None)))
        yield Move("has all parts of step", one.place, held, staged)


def _history_of(world: World, level: EpochLevel, step: int) -> History | None:
    """The history up to this step. None if a pod is gone, because the agents hold the parts."""
    pods = [world.pod((m.slot, m.attempt)) for m in level.members]
    if any(p is None or p.snap.epoch != level.number or len(p.history) < step for p in pods):
        return None
    return next(p.history[:step] for p in pods if p is not None)


# --- while an epoch runs, and after it broke --------------------------------------------------------------


def _watch(world: World, one: Coordinator, level: EpochLevel, rules: Rules) -> Iterator[Move]:
    """What happens to a running epoch: it breaks, a member is out of reach, a step is saved, it
    halts, or it is done.
    """
    found = find_cause(one.kept, one.view, orders_heard(world, one, rules))
    if found == "Leave" and level.transfers:
        found = None  # as `join._is_broken`
    if found is not None or _out_of_reach(world, one, level):
        cause = found or "AgentLost"
        if in_place.may_hold(world, one, level, cause, rules):
            held_level = replace(level, stage=Stage.HOLD, cause=cause, successor=0)
            held = one._replace(kept=keep(in_place.propose(world, one, held_level, rules)))
            yield Move("holds epoch", one.place, level.number, world.with_coordinator(held))
            return
        cut = one._replace(kept=keep(replace(level, stage=Stage.CUT, cause=cause)))
        kind = "cuts epoch" if found else "cuts, for silence, epoch"
        yield Move(kind, one.place, level.number, world.with_coordinator(cut))
        return
    yield from _stage(world, one, level)
    if rules.newcomers:
        yield from newcomers.invite(world, one, level, rules)
        if level.boundary is not None and level.boundary.hold:
            yield from newcomers.admit(world, one, level, rules)
            return
    if one.stop or must_leave(world, one, level):
        yield from halt(world, one, level)
    snaps = [s for s in one.view if s.epoch == level.number and s.work == IN]
    ended = len(snaps) == len(level.members) and all(s.step >= rules.steps for s in snaps)
    if ended and level.committed >= rules.steps:
        yield from _finish(world, one, level, rules)


def _finish(world: World, one: Coordinator, level: EpochLevel, rules: Rules) -> Iterator[Move]:
    if world.away or level.unclaimed:
        return
    done = Done(epoch=level.number, token=level.token, step=rules.steps)
    newest = runlog_rules.newest_claim(world.entries(one.read))
    if runlog_rules.may_append(done, newest).ok and is_free(world, one.read, rules):
        log = written(world, one.read, keep(done), rules)
        after = world._replace(log=log).with_coordinator(one._replace(read=len(log), ended="done"))
        yield Move("is done with epoch", one.place, level.number, after)


def _out_of_reach(world: World, one: Coordinator, level: EpochLevel) -> bool:
    return not all(reaches(world, one, (m.slot, m.attempt)) for m in level.members)


def _recover(world: World, one: Coordinator, level: EpochLevel, rules: Rules) -> Iterator[Move]:
    yield from _stage(world, one, level)
    members = {(m.slot, m.attempt) for m in level.members}
    heard = tuple((s, reaches(world, one, s.place)) for s in one.view)
    gone = frozenset(world.words[: one.words]) & members
    failed = frozenset(rank for epoch, rank in one.unsaved if epoch == level.number)
    waited = 100.0 if has_heard_all(world, one, members) else 0.0
    decision = decide_saver(one.kept, heard, gone, failed, waited)
    if isinstance(decision, Saver):
        yield from _save(world, one, level, decision)
    elif isinstance(decision, postmortem.Nothing):
        over = one._replace(kept=keep(replace(level, stage=Stage.OVER, saver=None)))
        lost = frozenset(p for p in members if not reaches(world, one, p))
        ended = world._replace(given_up=world.given_up | lost)
        kind = "gives up on the silent of epoch" if lost - gone else "ends epoch"
        if one.saved is not None:
            kind = "waits no longer for a commit, ends epoch"
        yield Move(kind, one.place, level.number, ended.with_coordinator(over))


def _save(world: World, one: Coordinator, level: EpochLevel, saver: Saver) -> Iterator[Move]:
    member = level.members[saver.rank]
    pod = world.pod((member.slot, member.attempt))
    ready = pod is not None and reaches(world, one, pod.snap.place)
    if pod is None or not ready or pod.snap.work != PARKED or one.saved is not None:
        return
    if pod.snap.epoch == level.number and pod.snap.step == saver.step:
        whole = level.number, saver.step, pod.history, saver.rank
        saved = world.with_coordinator(one._replace(saved=whole))
        yield Move("has step saved by", one.place, pod.snap.place, saved)
