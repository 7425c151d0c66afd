"""What must always hold for a job's membership, whatever happened before."""

import itertools

from everstep_agent.runlog import rules as runlog_rules
from everstep_contract.log import Claim, Commit, MemberId
from simulation.protocol import pods
from simulation.protocol.rules import Move
from simulation.protocol.world import IN, LIVING, OVER, Pod, World, is_over

LEFT = "says that it has left"


def check(before: World, move: Move) -> str:
    after: World = move.after
    found = ""
    if after.log != before.log:
        found = (
            _never_rewritten(before, after)
            or _one_lineage(after)
            or _one_claim_a_number(after)
            or _nothing_passed_over(before, after)
        )
    if not found and after.pods != before.pods:
        found = _nothing_thrown_away(before, after) or _one_gang_steps(before, after)
    found = found or _ends_when_fenced(after) or _stops_with_all_saved(before, after)
    return found or (_leaves_with_all_saved(after, move) if move.kind == LEFT else "")


def _never_rewritten(before: World, after: World) -> str:
    pairs = zip(before.log, after.log, strict=False)
    if len(after.log) < len(before.log) or any(new not in (old, 0) for old, new in pairs):
        return "the log was written over"
    return ""


def _one_lineage(world: World) -> str:
    """Each commit belongs to a claimed epoch, extends the training history of the commit before it,
    and holds as many steps as it states.
    """
    commits = [e for e in world.entries() if isinstance(e, Commit)]
    if any(c.epoch not in _list_claimed(world) for c in commits):
        return "a commit is of an epoch that nobody has claimed"
    held = [pods.read_history(c.digest) for c in commits]
    for older, newer in itertools.pairwise(held):
        if newer[: len(older)] != older or len(newer) == len(older):
            return f"a commit of {newer} does not go on from {older}"
    if any(len(h) != c.step for h, c in zip(held, commits, strict=True)):
        return "a commit does not hold as many steps as it says"
    return ""


def _one_claim_a_number(world: World) -> str:
    numbers = [e.epoch for e in world.entries() if isinstance(e, Claim)]
    return "" if len(set(numbers)) == len(numbers) else f"a number was claimed twice: {numbers}"


def _nothing_passed_over(before: World, after: World) -> str:
    """A claim leaves out a living member only if that member was declared gone, may be left out
    after the newest claim, or is outvoted. The claim resumes at most one step behind an outvoted
    member, which can have taken one step alone. It does not resume behind a living member that its
    claimer reaches and that nobody gave up.
    """
    claim = after.entries()[-1]
    former = [e for e in before.entries() if isinstance(e, Claim)]
    if not isinstance(claim, Claim) or not former:
        return ""
    resumed = claim.chain[-1].last_step if claim.chain else 0
    slot, attempt, _ = claim.token.split(".")
    claimer = int(slot), int(attempt)
    for pod in before.pods:
        held = _writes(before, pod, former[-1]) and pod.snap.work in LIVING
        if held and _goes_on(pod, claim):
            continue
        place = pod.snap.place
        reached = place not in before.words and before.linked(claimer, place)
        dead = {m for m in former[-1].members if not _lives(before, m)}
        majority = runlog_rules.holds_majority(former[-1], claim.members, dead)
        outvoted = majority and pod.snap.step <= resumed + 1
        yielded = (*place, former[-1].epoch) in after.yields
        kept = any(m == _member(pod, m.rank) for m in claim.members)
        if held and place not in after.words and not (outvoted or yielded or kept):
            return (
                f"epoch {claim.epoch} leaves out {place}, which lives in epoch {former[-1].epoch}"
            )
        if held and reached and place not in before.given_up and pod.snap.step > resumed:
            return f"{place} holds step {pod.snap.step}, epoch {claim.epoch} resumes at {resumed}"
    return ""


def _lives(world: World, member: MemberId) -> bool:
    return any(
        _member(pod, member.rank) == member and pod.snap.work in LIVING for pod in world.pods
    )


def _list_claimed(world: World) -> set[int]:
    return {e.epoch for e in world.entries() if isinstance(e, Claim)}


def _writes(world: World, pod: Pod, newest: Claim) -> bool:
    """Whether the pod's worker is in the newest claimed epoch, in an epoch that stepped first and
    is not claimed yet, or in the epoch that the newest claim continues with this worker.
    """
    epoch = pod.snap.epoch
    if epoch == newest.epoch or (epoch > 0 and epoch not in _list_claimed(world)):
        return True
    named = any(_member(pod, m.rank) == m for m in newest.members)
    return named and runlog_rules.former_of(newest) == epoch > 0


def _goes_on(pod: Pod, claim: Claim) -> bool:
    """Whether the pod is already in the claimed epoch, or in one that continues it."""
    level = pod.level
    return level is not None and level.number == pod.snap.epoch and level.follows(claim)


def _member(pod: Pod, rank: int) -> MemberId:
    """The pod's living worker, as a claim names it."""
    snap = pod.snap
    return MemberId(
        slot=snap.slot,
        attempt=snap.attempt,
        incarnation=snap.incarnation,
        rank=rank,
        life=snap.life,
    )


def _nothing_thrown_away(before: World, after: World) -> str:
    """A worker of the newest epoch is ended only when what it holds is committed, or its pod was
    declared gone or given up, or it leaves and all other living members hold the same, or its notice ends.
    """
    entries = before.entries()
    newest = runlog_rules.newest_claim(entries)
    if newest is None:
        return ""
    for pod in before.pods:
        if pod.snap.work not in LIVING or not _writes(before, pod, newest) or not pod.history:
            continue
        now = after.pod(pod.snap.place)
        if now is None or now.snap.work != OVER:
            continue
        if pod.snap.place in before.words or pod.snap.place in before.given_up:
            continue
        if _leaves_to_others(before, now) or _leaves_late(now):
            continue
        kept = [pods.read_history(e.digest) for e in entries if isinstance(e, Commit)]
        if all(held[: len(pod.history)] != pod.history for held in kept):
            return f"{pod.snap.place} is ended with step {pod.snap.step}, which is not committed"
    return ""


def _leaves_to_others(world: World, pod: Pod) -> bool:
    """Whether the worker ends because it leaves, and all living members that stay hold what it
    holds.
    """
    level = pod.level
    if level is None or _ident(pod) not in level.leaving:
        return False
    staying = [m for m in level.members if m.id not in level.leaving]
    others = [world.pod((m.slot, m.attempt)) for m in staying]
    living = [p for p in others if p is not None and p.snap.work in LIVING]
    return all(p.history[: len(pod.history)] == pod.history for p in living)


def _leaves_late(pod: Pod) -> bool:
    """Whether the worker ends beside the boundary at which all are to hold: its pod's notice ends, so it would die
    anyway.
    """
    level = pod.level
    if level is None or _ident(pod) not in level.leaving:
        return False
    return level.boundary is not None and level.boundary.hold and not level.transfers


def _ident(pod: Pod) -> tuple[int, int, int]:
    return pod.snap.slot, pod.snap.attempt, pod.snap.incarnation


def _one_gang_steps(before: World, after: World) -> str:
    """While a newer epoch steps, a pod steps in an older one only if it was declared gone, or if
    the newest claim leaves it out. The members of an epoch were all trained by the same steps, and
    none begins its epoch again behind the step that it had reached.
    """
    for now in after.pods:
        pod = before.pod(now.snap.place)
        same = pod is not None and now.snap.epoch == pod.snap.epoch > 0
        if pod is not None and same and len(now.history) < len(pod.history):
            return f"{now.snap.place} begins epoch {now.snap.epoch} again, behind where it stood"
    stepping = [p for p in after.pods if p.snap.work == IN and p.history]
    for pod in stepping:
        former = before.pod(pod.snap.place)
        if former is None or former.history == pod.history:
            continue
        for other in stepping:
            short = min(len(pod.history), len(other.history))
            if other.kept == pod.kept and other.history[:short] != pod.history[:short]:
                return f"{pod.history} and {other.history} are in one epoch"
            apart = other.snap.place != pod.snap.place and _token(other) != _token(pod)
            if not apart or not (_has_stepped(pod) and _has_stepped(other)):
                continue
            older = min(pod, other, key=lambda p: p.snap.epoch)
            if older.snap.place not in after.words and not _is_left_out(after, older):
                return f"{pod.snap.place} and {other.snap.place} step, in different gangs"
    return ""


def _stops_with_all_saved(before: World, after: World) -> str:
    """A coordinator that reports that the job has stopped reaches no pod that holds more than is
    committed.
    """
    entries = after.entries()
    newest = runlog_rules.newest_claim(entries)
    for one in after.coordinators:
        former = before.coordinator(one.place)
        if one.ended != "stopped" or newest is None or (former and former.ended):
            continue
        kept = [pods.read_history(e.digest) for e in entries if isinstance(e, Commit)]
        for pod in after.pods:
            place = pod.snap.place
            holds = pod.snap.work in LIVING and _writes(after, pod, newest) and pod.history
            excused = place in after.words or place in after.given_up
            if not holds or excused or not after.linked(one.place, place):
                continue
            if all(held[: len(pod.history)] != pod.history for held in kept):
                return f"stopped though {place} holds step {pod.snap.step}, which is not committed"
    return ""


def _leaves_with_all_saved(world: World, move: Move) -> str:
    """A pod that is reported to have left holds nothing that is not committed."""
    entries = world.entries()
    newest, pod = runlog_rules.newest_claim(entries), world.pod(move.whom)
    if pod is None or newest is None or pod.snap.place in world.given_up:
        return ""
    if pod.snap.work not in LIVING or not _writes(world, pod, newest) or not pod.history:
        return ""
    kept = [pods.read_history(e.digest) for e in entries if isinstance(e, Commit)]
    if any(held[: len(pod.history)] == pod.history for held in kept):
        return ""
    return f"{move.whom} is said to have left with step {pod.snap.step}, which is not committed"


def _has_stepped(pod: Pod) -> bool:
    """Whether the pod has stepped in its epoch. Starting from the commit's state is not a step."""
    return pod.history[-1] == pod.snap.epoch


def _is_left_out(world: World, pod: Pod) -> bool:
    """Whether the newest claim does not name the pod's worker. Whether it may leave it out was
    checked when the claim was made.
    """
    newest = runlog_rules.newest_claim(world.entries())
    if newest is None or newest.epoch <= pod.snap.epoch:
        return False
    return all(_member(pod, m.rank) != m for m in newest.members)


def _token(pod: Pod) -> str:
    return pod.level.token if pod.level is not None else ""


def _ends_when_fenced(world: World) -> str:
    """A coordinator that has read a newer claim that names none of its gang does not continue its
    epoch.
    """
    for one in world.coordinators:
        level = one.level
        if one.ended or level is None or is_over(level) or not level.live or one.owed is not None:
            continue
        newest = runlog_rules.newest_claim(world.entries(one.read))
        if not runlog_rules.fenced(newest, pods.build_gang(level)).ok:
            return (
                f"{one.place} goes on with epoch {level.number}, though it has read a newer claim"
            )
    return ""
