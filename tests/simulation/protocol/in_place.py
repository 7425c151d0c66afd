"""The survivors of a loss continue in place: what the coordinator does between the loss and the
claim of their epoch, and what a pod does when it receives a level. The runtime's own functions
decide.

`reduction.py` models micro-batches and vectors. Here every reduction is a whole step. So a survivor
that is one step behind holds the sums, and takes that step when it receives the position. Not
modelled: a pod that leaves without a replacement.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from everstep_agent.coordinator import members, regroup_rules, rounds
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog.log_index import LogIndex
from everstep_contract.log import Claim
from simulation.protocol import step_first
from simulation.protocol.log_moves import without, written
from simulation.protocol.orders import reaches, wanted_by
from simulation.protocol.rules import JOB, Move, Rules
from simulation.protocol.world import (
    DEAD,
    HELD,
    IN,
    LIVING,
    Coordinator,
    Place,
    Pod,
    Snap,
    World,
    build_report,
    keep,
    kept,
)

GIVES_UP = "gives up on going on in place in epoch"
"""A move that takes seconds: the time limit for the answers of all survivors."""
Planned = tuple[tuple[EpochMember, ...], regroup_rules.Decision | regroup_rules.Wait]


def may_hold(world: World, one: Coordinator, level: EpochLevel, cause: str, rules: Rules) -> bool:
    """As `regroup.why_not`."""
    if one.stop or not rules.in_place:
        return False
    return _why_not(keep(level), one.view, step_first.list_gone(world, one, rules), cause) == ""


def may_take_up(level: EpochLevel, rules: Rules) -> bool:
    """As `regroup.why_not_taken_up`, for a successor that has not received an order of the operator
    yet.
    """
    return rules.in_place and regroup_rules.why_not_now(level) == ""


def go_on(world: World, one: Coordinator, level: EpochLevel, rules: Rules) -> Iterator[Move]:
    """Continue from the hold to the claim, or to the restart of all."""
    level = propose(world, one, level, rules)
    if level != one.level:
        asked = world.with_coordinator(one._replace(kept=keep(level)))
        yield Move("asks to join", one.place, level.successor, asked)
        return
    survivors, plan = _plan(one.kept, _recent(world, one), step_first.list_gone(world, one, rules))
    if isinstance(plan, regroup_rules.Wait):
        yield Move(GIVES_UP, one.place, level.number, world.with_coordinator(_cut(one, level)))
    elif not isinstance(plan, regroup_rules.Plan) or regroup_rules.why_not_again(
        level, survivors, plan
    ):
        cut = world.with_coordinator(_cut(one, level))
        yield Move("cannot go on in place, cuts epoch", one.place, level.number, cut)
    else:
        yield from _claim_or_step(world, one, level, survivors, plan, rules)


def _claim_or_step(
    world: World,
    one: Coordinator,
    level: EpochLevel,
    survivors: Sequence[EpochMember],
    plan: regroup_rules.Plan,
    rules: Rules,
) -> Iterator[Move]:
    def following(number: int, token: str) -> EpochLevel:
        return regroup_rules.continue_epoch(level, survivors, plan, number=number, token=token)

    if not step_first.why_claim_first(world, one, level, survivors, rules):
        yield step_first.begin(world, one, level, survivors, plan.applied, following, rules)
    elif may_claim_now(world, one, level):
        yield from claim(world, one, level, survivors, plan.applied, following, rules)


def may_claim_now(world: World, one: Coordinator, level: EpochLevel) -> bool:
    """Whether a claim is possible now: the log has been read, the store answers, and no earlier
    claim is pending.
    """
    return one.read == len(world.log) and not world.away and not level.unclaimed


def propose(world: World, one: Coordinator, level: EpochLevel, rules: Rules) -> EpochLevel:
    """As `regroup._propose`."""
    if not rules.join_first:
        return level
    last = LogIndex(world.entries(one.read)).next_epoch - 1
    reports = [build_report(s) for s in one.view]
    number = regroup_rules.choose_successor(level, last, reports, one.burnt)
    token = step_first.write_token(one, number) if rules.by_token else step_first.ANY
    return replace(level, successor=number, successor_token=token)


def claim(
    world: World,
    one: Coordinator,
    level: EpochLevel,
    following: Sequence[EpochMember],
    applied: int,
    build: Callable[[int, str], EpochLevel],
    rules: Rules,
) -> Iterator[Move]:
    """As `regroup.claim` and `regroup.begin`. `build` makes the epoch from its number and token."""
    known = world.entries(one.read)
    claims = [e for e in known if isinstance(e, Claim)]
    reports = [build_report(s) for s in one.view]
    ids = tuple(i for m in following for i in m.ids())
    yields = step_first.list_yields(world, one, rules)
    proof = rounds.build_proof(claims[-1], reports, wanted_by(world, one, rules), yields)
    chain = runlog_rules.continued_chain(claims, level.number, applied)
    newest = LogIndex(known).newest_resumable
    if rules.extend_commits and runlog_rules.why_behind(newest, chain):
        cut = world.with_coordinator(_cut(one, level))
        yield Move("is behind a commit, cuts epoch", one.place, level.number, cut)
        return
    last = LogIndex(known).next_epoch - 1
    number = level.successor or rounds.next_number(last, reports, one.burnt)
    if number <= last:
        burnt = _cut(one, level)._replace(burnt=max(one.burnt, number))
        used = world.with_coordinator(burnt)
        yield Move("finds its number used, cuts epoch", one.place, level.number, used)
        return
    proven = rules.silence_is_death or not rules.proof_needed
    if not proven and not runlog_rules.may_claim(claims, ids, proof, job_uid=JOB).ok:
        cut = world.with_coordinator(_cut(one, level))
        yield Move("may not claim, cuts epoch", one.place, level.number, cut)
        return
    entry = step_first.write_claim(one, number, level.number, claims, ids, applied)
    epoch = replace(build(number, entry.token), stage=Stage.RUNNING)
    if rules.know_commits:
        epoch = regroup_rules.note_commit(epoch, newest)
    begun = one._replace(kept=keep(epoch), saved=None, round=0)
    if not rules.claim_first:
        ahead = begun._replace(owed=(keep(entry), keep(epoch)))
        yield Move("goes on, unclaimed, as epoch", one.place, number, world.with_coordinator(ahead))
        return
    slots = tuple(m.slot for m in following)
    log = written(world, one.read, keep(entry), rules)
    after = world._replace(log=log)
    claimed = after.with_coordinator(begun._replace(read=len(log)))
    yield Move(f"claims, in place, {number} of", one.place, slots, claimed)
    if "answer" in world.faults:
        unsure = one._replace(owed=(keep(entry), keep(epoch)), saved=None)
        lost = after._replace(faults=without(world.faults, "answer"))
        yield Move("claims, in place, unheard,", one.place, number, lost.with_coordinator(unsure))


def _cut(one: Coordinator, level: EpochLevel) -> Coordinator:
    burnt = max(one.burnt, level.successor)
    return one._replace(kept=keep(replace(level, stage=Stage.CUT)), burnt=burnt)


def _recent(world: World, one: Coordinator) -> tuple[Snap, ...]:
    """The newest report of each pod that is not silent."""
    return tuple(s for s in one.view if reaches(world, one, s.place))


@lru_cache(maxsize=1 << 16)
def _why_not(level: int, views: tuple[Snap, ...], gone: frozenset[Place], cause: str) -> str:
    epoch, reports = kept(level), [build_report(s) for s in views]
    lost = members.list_lost(epoch, reports, gone)
    return regroup_rules.why_not_in_place(epoch, reports, cause, failure=False, lost=lost)


@lru_cache(maxsize=1 << 16)
def _plan(level: int, views: tuple[Snap, ...], gone: frozenset[Place]) -> Planned:
    epoch, reports = kept(level), [build_report(s) for s in views]
    lost = members.list_lost(epoch, reports, gone)
    return regroup_rules.decide_regroup(epoch, reports, lost)


# --- the pod ----------------------------------------------------------------------------------------------


def continues(pod: Pod, level: EpochLevel | None, rules: Rules) -> bool:
    """As `Pod._continue_in_place`: whether its worker is a member of an epoch that continues its
    own.
    """
    snap = pod.snap
    if level is None or (level.number < snap.joined and rules.join_first):
        return False
    return snap.work in (HELD, DEAD) and is_named(snap, level)


def leaves(snap: Snap, level: EpochLevel) -> bool:
    """Whether its worker ends so that the others continue without it."""
    return snap.work in LIVING and (snap.slot, snap.attempt, snap.incarnation) in level.leaving


def is_named(snap: Snap, level: EpochLevel | None) -> bool:
    """As `Pod._find_place`."""
    ident = (snap.slot, snap.attempt, snap.incarnation)
    mine = level.place_after(snap.epoch, ident) if level is not None else None
    return mine is not None and mine.lives == (snap.life,)


def enter(pod: Pod, level: EpochLevel) -> Pod:
    """The worker takes the step that it lacks, if any, under the former epoch, and enters the new
    one. A worker that has died meanwhile becomes a member, too.
    """
    snap, in_place = pod.snap, level.in_place
    assert in_place is not None
    snap = snap._replace(
        epoch=level.number, joined=max(snap.joined, level.number), promised=level.token
    )
    if snap.work == DEAD:
        return pod._replace(snap=snap)
    lacking = in_place.applied - snap.step
    history = (*pod.history, *((in_place.former,) * lacking))
    return pod._replace(snap=snap._replace(work=IN, step=in_place.applied), history=history)
