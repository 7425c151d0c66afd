"""What a pod does next: its worker steps, it receives its coordinator's levels, or it takes the
coordinator's role.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from everstep_agent.peers.epoch_level import EpochLevel, Stage
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog.log_index import LogIndex
from everstep_contract.log import Done
from simulation.protocol import in_place, newcomer_pods
from simulation.protocol.peers import FOREVER, choose, hear_witness
from simulation.protocol.rules import JOB, TURN, Move, Rules
from simulation.protocol.world import (
    DEAD,
    HELD,
    IN,
    LIVING,
    OVER,
    PARKED,
    Coordinator,
    Place,
    Pod,
    Snap,
    World,
    is_over,
    keep,
    kept,
    oldest_living,
)


def train(world: World, pod: Pod, rules: Rules) -> Iterator[Move]:
    """The worker applies a step once every member's part of it is available."""
    snap, level = pod.snap, pod.level
    if not _steps(snap, rules) or snap.step >= rules.steps:
        return
    if level is None or level.number != snap.epoch:
        return
    if level.boundary is not None and snap.step >= level.boundary.step:
        gives = level.boundary.hold and snap.work == HELD
        if rules.sums_wait or not gives:
            return
    for member in level.members:
        if not _contributes(world, pod, world.pod((member.slot, member.attempt)), rules):
            return
    stepped = pod._replace(
        snap=snap._replace(step=snap.step + 1), history=(*pod.history, snap.epoch)
    )
    yield Move("applies a step", snap.place, None, world.with_pod(stepped))


def _steps(snap: Snap, rules: Rules) -> bool:
    goes_on = not (rules.hold_first and rules.sums_wait)
    return snap.work == IN or (snap.work == HELD and goes_on)


def _contributes(world: World, pod: Pod, other: Pod | None, rules: Rules) -> bool:
    """Whether the other pod's part is available: it is at this step and within reach, or has
    already applied it.
    """
    if other is None or other.snap.epoch != pod.snap.epoch:
        return False
    if other.snap.step > pod.snap.step:
        return True
    if other.snap.step < pod.snap.step or not _steps(other.snap, rules):
        return False
    return world.linked(pod.snap.place, other.snap.place)


# --- receiving levels -------------------------------------------------------------------------------------


def tell(world: World, pod: Pod, one: Coordinator, rules: Rules) -> Iterator[Move]:
    told = _apply(world, pod, one, rules)
    if told == pod:
        return
    after = world.with_pod(told)
    if not told.up:
        after = after.without_coordinator(pod.snap.place)
    yield Move("is told", pod.snap.place, one.place, after)


def _apply(world: World, pod: Pod, one: Coordinator, rules: Rules) -> Pod:
    """As the agent's `Pod.apply`: compare with the levels, and do what is missing."""
    if one.ended:
        return pod._replace(up=False)
    level = one.level
    known = 0 if level is None else level.claimed
    if known < pod.snap.epoch:
        known = max(known, oldest_living(world.log[: one.read], rules.log_spares_named))
    if not rules.know_before_ending:
        known = max(known, one.round)
    return _compare(pod, one.place, one.kept, one.round, known, rules)


@lru_cache(maxsize=1 << 18)
def _compare(pod: Pod, by: Place, level_kept: int, round_: int, known: int, rules: Rules) -> Pod:
    """`known`: the newest epoch that the coordinator can prove to be claimed."""
    snap, level = pod.snap, kept(level_kept)
    number = level.number if level else 0
    if level is not None and level.stage in (Stage.CUT, Stage.OVER):
        snap = snap._replace(cut=max(snap.cut, number))
    if rules.newcomers:
        if level is not None and newcomer_pods.enters(pod, level):
            return newcomer_pods.enter(pod._replace(kept=level_kept, follows=by), level)
        pod = newcomer_pods.follow(pod._replace(snap=snap), level)
        snap = pod.snap
    if level is not None and in_place.continues(pod, level, rules):
        entered = in_place.enter(pod._replace(snap=snap, kept=level_kept, follows=by), level)
        return entered._replace(snap=entered.snap._replace(held=0), own=0)
    kept_out = rules.named_stay and snap.work in LIVING and in_place.is_named(snap, level)
    if snap.epoch and known > snap.epoch:
        snap = snap._replace(work=OVER) if snap.work in LIVING and not kept_out else snap
    elif snap.epoch and level is not None and number == snap.epoch:
        if level.successor > snap.joined:
            snap = snap._replace(joined=level.successor, promised=level.successor_token)
        if snap.work == IN and (level.stage is Stage.HOLD or newcomer_pods.holds(snap, level)):
            snap = snap._replace(work=HELD)
        if level.stage is Stage.CUT and snap.work in (IN, HELD):
            snap = snap._replace(work=PARKED)
        if in_place.leaves(snap, level):
            snap = snap._replace(work=OVER)
        if level.stage is Stage.OVER and snap.work in LIVING:
            snap = snap._replace(work=OVER)
    if snap.free and round_ > max(snap.joined, snap.epoch):
        snap = snap._replace(joined=round_, promised="")
    own = _find_own(pod, snap, level)
    heard = pod.level
    if level is not None and (heard is None or number >= heard.number):
        heard = level
    unheard = (number < snap.epoch or kept_out) and snap.work in LIVING and not is_over(own)
    snap = snap._replace(held=keep(own) if unheard else 0)
    apart = own is not None and own != heard
    pod = pod._replace(snap=snap, kept=keep(heard), own=keep(own) if apart else 0, follows=by)
    return _begin(pod, level, rules) if level is not None else pod


def _find_own(pod: Pod, snap: Snap, told: EpochLevel | None) -> EpochLevel | None:
    """The level of its living worker's epoch, as last heard."""
    known = (told, kept(pod.own), pod.level)
    living = snap.work in LIVING
    return next((x for x in known if living and x is not None and x.number == snap.epoch), None)


def _begin(pod: Pod, level: EpochLevel, rules: Rules) -> Pod:
    snap = pod.snap
    mine = level.member(snap.slot, snap.attempt, snap.incarnation)
    waits = level.live and snap.joined == level.number and snap.free
    if mine is None or not waits:
        return pod
    another = level.number <= snap.epoch or mine.lives != (snap.life + 1,)
    if another and (rules.lives_count or snap.work != DEAD):
        return pod
    history = read_history(level.commit.digest) if level.commit else ()
    if not rules.state_on_chain and len(pod.history) > len(history):
        history = pod.history
    begun = snap._replace(life=snap.life + 1, work=IN, epoch=level.number, step=len(history))
    return pod._replace(snap=begun, history=history)


def write_history(history: tuple[int, ...]) -> str:
    """The model's manifest: the epochs in which the state's steps were applied."""
    return ".".join(map(str, history))


def read_history(digest: str) -> tuple[int, ...]:
    return tuple(int(e) for e in digest.split("."))


# --- the role ---------------------------------------------------------------------------------------------


def take_role(world: World, pod: Pod, rules: Rules) -> Iterator[Move]:
    """An agent that follows no coordinator takes the role when `choose_coordinator` says so: at
    once, or when its turn has come. It reads the log before anything else.
    """
    if world.away:
        return
    if choose(world, pod, alone_for=0.0).act:
        yield Move("coordinates", pod.snap.place, None, with_role(world, pod, rules))
    elif choose(world, pod, alone_for=FOREVER).act:
        yield Move(TURN, pod.snap.place, None, with_role(world, pod, rules))


def with_role(world: World, pod: Pod, rules: Rules) -> World:
    place, level = pod.snap.place, pod.level
    if rules.catch_up:
        level = hear_witness(world, pod) or level
    entries = world.entries()
    commit = LogIndex(entries).newest_resumable
    if level is not None and commit and commit.epoch == level.number:
        level = replace(level, committed=max(level.committed, commit.step))
    if level is not None and level.stage is not Stage.OVER:
        stage = Stage.HOLD if in_place.may_take_up(level, rules) else Stage.CUT
        level = replace(level, stage=stage, saver=None, successor=0, successor_token="")
    words = world.words.index(place) if place in world.words else len(world.words)
    one = Coordinator(place, read=len(world.log), kept=keep(level), words=words)
    return world.with_coordinator(one._replace(ended=_why_over(world, level)))


def _why_over(world: World, level: EpochLevel | None) -> str:
    """As `Coordinator._open`: the run is done, or a newer claim ends the epoch that the pod has
    heard of.
    """
    entries = world.entries()
    newest = runlog_rules.newest_claim(entries)
    done = next((e for e in entries if isinstance(e, Done)), None)
    if done is not None and newest is not None and done.token == newest.token:
        return "done"
    if level is None or level.stage is Stage.OVER:
        return ""
    return "" if runlog_rules.fenced(newest, build_gang(level)).ok else "fenced"


def build_gang(level: EpochLevel) -> runlog_rules.Gang:
    pods = frozenset((m.slot, m.attempt) for m in level.members)
    return runlog_rules.Gang(epoch=level.claimed, job_uid=JOB, pods=pods)
