"""The survivors of a proven loss step before their claim is in the log (rule 3), and the claim follows.
The runtime's own functions decide.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from everstep_agent.coordinator import (
    members,
    regroup_rules,
    rounds,
    silence_rules,
    step_first_rules,
)
from everstep_agent.coordinator.step_first_rules import Shrink
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog.log_index import LogIndex
from everstep_contract import levels
from everstep_contract.log import Claim, MemberId
from simulation.protocol.decisions import NEVER
from simulation.protocol.log_moves import without, written
from simulation.protocol.orders import reaches, wanted_by
from simulation.protocol.rules import JOB, Move, Rules
from simulation.protocol.world import Coordinator, Place, World, build_report, keep

ANY = "any"
"""In a variant: the token that every coordinator uses, so that only the number counts."""


def why_claim_first(
    world: World,
    one: Coordinator,
    level: EpochLevel,
    survivors: Sequence[EpochMember],
    rules: Rules,
) -> str:
    reports = [build_report(s) for s in one.view]
    shrink = Shrink(
        epoch=level,
        survivors=survivors,
        reports=reports,
        lost=members.list_lost(level, reports, list_gone(world, one, rules)),
    )
    known = LogIndex(world.entries(one.read))
    if rules.step_first is not None:
        return rules.step_first(shrink, known)
    return step_first_rules.why_claim_first(shrink, known, job_uid=JOB)


def begin(
    world: World,
    one: Coordinator,
    level: EpochLevel,
    following: Sequence[EpochMember],
    applied: int,
    build: Callable[[int, str], EpochLevel],
    rules: Rules,
) -> Move:
    """As `regroup.begin`, with the claim that is to follow."""
    known = LogIndex(world.entries(one.read))
    pending = step_first_rules.list_pending(level, known)
    ids = tuple(i for m in following for i in m.ids())
    claims = [*known.claims, *pending]
    entry = write_claim(one, level.successor, level.number, claims, ids, applied)
    epoch = build(entry.epoch, entry.token)
    epoch = replace(epoch, stage=Stage.RUNNING, unclaimed=(*pending, entry))
    if rules.know_commits:
        epoch = regroup_rules.note_commit(epoch, known.newest_resumable)
    begun = one._replace(kept=keep(epoch), saved=None, round=0)
    return Move("steps first, as epoch", one.place, entry.epoch, world.with_coordinator(begun))


def claim_behind(world: World, one: Coordinator, level: EpochLevel, rules: Rules) -> Iterator[Move]:
    """As `claim_behind.py`: the oldest pending claim is appended, found, or refused."""
    if world.away or one.read < len(world.log):
        return
    claim = level.unclaimed[0]
    entry, noted = keep(claim), keep(replace(level, unclaimed=level.unclaimed[1:]))
    if entry in world.log:
        found = world.with_coordinator(one._replace(kept=noted))
        yield Move("finds the claim of", one.place, claim.epoch, found)
    elif _why_refused(world, claim):
        stage = Stage.OVER if level.stage is Stage.OVER else Stage.CUT
        refused = keep(replace(level, unclaimed=(), stage=stage, boundary=None))
        after = one._replace(kept=refused, burnt=max(one.burnt, level.number))
        yield Move("cannot claim any more", one.place, claim.epoch, world.with_coordinator(after))
    else:
        log = written(world, one.read, entry, rules)
        heard = world._replace(log=log)
        claimed = heard.with_coordinator(one._replace(read=len(log), kept=noted))
        yield Move("claims, behind,", one.place, claim.epoch, claimed)
        if "answer" in world.faults:
            lost = heard._replace(faults=without(world.faults, "answer"))
            yield Move("claims, behind and unheard,", one.place, claim.epoch, lost)


def _why_refused(world: World, claim: Claim) -> str:
    known = LogIndex(world.entries())
    return runlog_rules.why_not_behind(claim, known.newest_claim) or runlog_rules.why_behind(
        known.newest_resumable, claim.chain
    )


def write_claim(
    one: Coordinator,
    number: int,
    former: int,
    claims: Sequence[Claim],
    ids: tuple[MemberId, ...],
    applied: int,
) -> Claim:
    return Claim(
        epoch=number,
        token=write_token(one, number),
        members=ids,
        coordinator="",
        job_uid=JOB,
        job="ns/job",
        chain=runlog_rules.continued_chain(claims, former, applied),
    )


def write_token(one: Coordinator, number: int) -> str:
    return f"{one.place[0]}.{one.place[1]}.{number}"


def list_gone(world: World, one: Coordinator, rules: Rules) -> frozenset[Place]:
    """Members that need not answer: declared gone by the operator, silent and outvoted, or silent
    and left out by the operator's permission.
    """
    words, level = frozenset(world.words[: one.words]), one.level
    if level is None:
        return words
    silent = [m for m in level.members if not reaches(world, one, (m.slot, m.attempt))]
    if not silent and not one.yields:
        return words
    if rules.silence_is_death:
        return words | {(m.slot, m.attempt) for m in silent}
    known = LogIndex(world.entries(one.read))
    pending = step_first_rules.list_pending(level, known)
    newest = pending[-1] if pending else known.newest_claim
    told = [build_report(s) for s in one.view]
    lost = members.list_lost(level, told, words)
    proof = rounds.build_proof(newest, told, wanted_by(world, one, rules))
    proven = runlog_rules.list_dead(newest, proof) if newest is not None else ()
    ids = [m.id for m in silent]
    outvoted = silence_rules.list_outvoted(level, newest, ids, lost, told, proven)
    yielded = silence_rules.list_yielded(level, list_yields(world, one, rules), newest)
    return words | {(slot, attempt) for slot, attempt, _ in outvoted | yielded}


def list_yields(world: World, one: Coordinator, rules: Rules) -> tuple[levels.Yield, ...]:
    """As `silence_rules.list_yields`: a pod within reach counts as heard."""
    wanted = wanted_by(world, one, rules)
    aged = [
        (build_report(p.snap), 0.0 if reaches(world, one, p.snap.place) else NEVER)
        for p in world.pods
    ]
    given = silence_rules.list_yields(wanted, aged if rules.yields_are_of_silent else (), NEVER)
    newest = runlog_rules.newest_claim(world.entries(one.read))
    if rules.yields_expire or newest is None:
        return given
    return tuple(replace(y, epoch=newest.epoch) for y in given)
