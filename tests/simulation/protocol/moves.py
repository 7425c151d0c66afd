"""Everything that can happen next. Whatever is decided, the runtime's own functions decide it; only
the way from a decision to its deed is told again here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from everstep_agent import breaks, postmortem, rounds, runlog_rules
from everstep_agent.messages import EpochLevel, Saver, Stage
from everstep_contract.log import Claim, Commit
from simulation.protocol.world import (
    DEAD,
    IN,
    LIVING,
    NONE,
    OVER,
    PARKED,
    Coordinator,
    History,
    Place,
    Pod,
    Snap,
    World,
    build_report,
    build_wanted,
    keep,
)

JOB = "job-uid"
Move = tuple[str, World]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The protocol, or a variant of it that must fail."""

    steps: int = 2
    least: int = 1
    create_only: bool = True
    proof_needed: bool = True
    lives_count: bool = True
    know_before_ending: bool = True
    """A worker is ended for a newer epoch that is claimed, not for a round that knows nothing of its own."""
    catch_up: bool = True
    """A newcomer that coordinates hears of the newest epoch first."""
    on_chain: bool = True


def list_moves(world: World, rules: Rules) -> Iterator[Move]:
    for pod in world.pods:
        if pod.up:
            yield from _train(world, pod, rules)
            yield from _take_role(world, pod, rules)
    for one in world.coordinators:
        yield from _listen(world, one)
        yield from _tell(world, one, rules)
        yield from _coordinate(world, one, rules)
    yield from _operate(world)
    yield from _strike(world, rules)


# --- pods ------------------------------------------------------------------------------------------------


def _train(world: World, pod: Pod, rules: Rules) -> Iterator[Move]:
    """A step is applied once every member's part of it is there."""
    snap, level = pod.snap, pod.level
    if snap.work != IN or snap.step >= rules.steps or level is None or level.number != snap.epoch:
        return
    for member in level.members:
        other = world.pod((member.slot, member.attempt))
        if other is None or not _contributes(world, pod, other):
            return
    stepped = pod._replace(
        snap=snap._replace(step=snap.step + 1), history=(*pod.history, snap.epoch)
    )
    yield (
        f"{snap.place} applies step {snap.step + 1} of epoch {snap.epoch}",
        world.with_pod(stepped),
    )


def _contributes(world: World, pod: Pod, other: Pod) -> bool:
    mine, its = pod.snap, other.snap
    if its.epoch != mine.epoch:
        return False
    if its.step > mine.step:
        return True
    alive = other.up and its.work == IN and its.step == mine.step
    return alive and world.linked(mine.place, its.place)


def _take_role(world: World, pod: Pod, rules: Rules) -> Iterator[Move]:
    """Who sees no coordinator takes the role; rivals are those that do not see each other, or a duel."""
    place = pod.snap.place
    seen = [c for c in world.coordinators if world.linked(place, c.place)]
    if seen or rounds.is_gone(*place, build_wanted(world.current, world.gone, rules.least)):
        return
    if place[1] < world.current[place[0]]:
        return
    yield f"{place} coordinates", _with_role(world, pod, rules)


def _with_role(world: World, pod: Pod, rules: Rules) -> World:
    place, level = pod.snap.place, pod.level
    if rules.catch_up:
        reached = [p for p in world.pods if p.up and world.linked(place, p.snap.place)]
        newest = max(reached, key=lambda p: p.snap.epoch)
        if newest.snap.epoch > (level.number if level else 0):
            level = newest.level
    newest_commit = runlog_rules.newest_resumable(world.entries())
    if level is not None and newest_commit and newest_commit.epoch == level.number:
        level = replace(level, committed=max(level.committed, newest_commit.step))
    if level is not None and level.stage is not Stage.OVER:
        level = replace(level, stage=Stage.CUT, saver=None)
    return world.with_coordinator(Coordinator(place, read=len(world.log), kept=keep(level)))


# --- messages ---------------------------------------------------------------------------------------------


def _listen(world: World, one: Coordinator) -> Iterator[Move]:
    for pod in world.pods:
        snap = pod.snap
        if pod.up and _follows(world, pod) == one.place and snap not in one.view:
            others = [s for s in one.view if s.place != snap.place]
            view = tuple(sorted([*others, snap]))
            yield f"{one.place} hears {snap.place}", world.with_coordinator(one._replace(view=view))


def _tell(world: World, one: Coordinator, rules: Rules) -> Iterator[Move]:
    for pod in world.pods:
        if pod.up and _follows(world, pod) == one.place:
            told = _apply(world, pod, one, rules)
            if told != pod:
                yield f"{pod.snap.place} is told by {one.place}", world.with_pod(told)


def _follows(world: World, pod: Pod) -> Place | None:
    """Its own role; else whom it follows already; else, of those that it reaches, the newest epoch's."""
    place = pod.snap.place
    seen = {c.place: c for c in world.coordinators if world.linked(place, c.place)}
    if place in seen:
        return place
    if pod.follows in seen:
        return pod.follows
    return min(seen, key=lambda p: _rank_of(world, p), default=None)


def _rank_of(world: World, place: Place) -> tuple[int, int]:
    pod = world.pod(place)
    return -(pod.snap.epoch if pod else 0), place[0]


def _apply(world: World, pod: Pod, one: Coordinator, rules: Rules) -> Pod:
    """As `Pod.apply` of the agent: compare with the levels, do what is missing."""
    snap, level = pod.snap, one.level
    number = level.number if level else 0
    if level is not None and not level.live:
        snap = snap._replace(cut=max(snap.cut, number))
    ends = number if rules.know_before_ending else max(number, one.round)
    if snap.epoch and number != snap.epoch and ends > snap.epoch:
        snap = snap._replace(work=OVER) if snap.work in LIVING else snap
    elif snap.epoch and level is not None and number == snap.epoch:
        if level.stage is Stage.CUT and snap.work == IN:
            snap = snap._replace(work=PARKED)
        if level.stage is Stage.OVER and snap.work in LIVING:
            snap = snap._replace(work=OVER)
    if snap.free and one.round > max(snap.joined, snap.epoch):
        snap = snap._replace(joined=one.round)
    heard = level if level is not None and number >= _number(pod.level) else pod.level
    pod = pod._replace(snap=snap, kept=keep(heard), follows=one.place)
    return _begin(world, pod, level) if level is not None else pod


def _number(level: EpochLevel | None) -> int:
    return level.number if level else 0


def _begin(world: World, pod: Pod, level: EpochLevel) -> Pod:
    snap = pod.snap
    mine = level.member(snap.slot, snap.attempt, snap.incarnation)
    waits = level.live and level.number > snap.epoch and snap.joined == level.number and snap.free
    if mine is None or not waits or mine.lives != (snap.life + 1,):
        return pod
    history = world.held(level.commit.manifest) if level.commit else ()
    begun = snap._replace(life=snap.life + 1, work=IN, epoch=level.number, step=len(history))
    return pod._replace(snap=begun, history=history)


# --- the coordinator --------------------------------------------------------------------------------------


def _coordinate(world: World, one: Coordinator, rules: Rules) -> Iterator[Move]:
    if one.read < len(world.log):
        yield f"{one.place} reads the log", _refreshed(world, one)
    if any(s.epoch > _number(one.level) for s in one.view) or _has_rival(world, one):
        yield f"{one.place} lays the role down", world.without_coordinator(one.place)
        return
    if one.saved is not None:
        yield from _commit(world, one, rules)
    if one.level is None or one.level.stage is Stage.OVER:
        yield from _gather(world, one, rules)
    elif one.level.stage is Stage.CUT:
        yield from _recover(world, one)
    else:
        yield from _watch(world, one, rules)


def _has_rival(world: World, one: Coordinator) -> bool:
    """Another that precedes it."""
    others = [c.place for c in world.coordinators if c.place != one.place]
    mine = _rank_of(world, one.place)
    return any(world.linked(one.place, p) and _rank_of(world, p) < mine for p in others)


def _refreshed(world: World, one: Coordinator) -> World:
    """It looks at what was written meanwhile; a gang that is fenced by it ends."""
    world = world.with_coordinator(one._replace(read=len(world.log)))
    if one.level is None:
        return world
    gang = runlog_rules.Gang(
        epoch=one.level.number,
        job_uid=JOB,
        pods=frozenset((m.slot, m.attempt) for m in one.level.members),
    )
    if runlog_rules.fenced(runlog_rules.newest_claim(world.entries()), gang).ok:
        return world
    world = world.without_coordinator(one.place)
    for member in one.level.members:
        pod = world.pod((member.slot, member.attempt))
        reached = pod is not None and pod.up and world.linked(one.place, pod.snap.place)
        if pod is not None and reached and pod.snap.epoch == one.level.number:
            world = world.with_pod(pod._replace(up=False))
    return world


def _gather(world: World, one: Coordinator, rules: Rules) -> Iterator[Move]:
    known = world.entries(one.read)
    reports = [build_report(s) for s in one.view]
    number = rounds.next_number(runlog_rules.next_epoch(known) - 1, reports, one.burnt)
    if one.round < number and not any(s.joined == one.round for s in one.view if one.round):
        opened = one._replace(round=number)
        yield f"{one.place} opens round {number}", world.with_coordinator(opened)
        return
    wanted = build_wanted(world.current, world.gone, rules.least)
    for waited in (0.0, 10.0):
        decision = rounds.decide_epoch(reports, wanted, round=one.round, waited=waited, gang=5.0)
        if isinstance(decision, rounds.Start):
            yield from _claim(world, one, decision, rules)
            return


def _claim(world: World, one: Coordinator, start: rounds.Start, rules: Rules) -> Iterator[Move]:
    known = world.entries(one.read)
    claims = [e for e in known if isinstance(e, Claim)]
    newest = claims[-1] if claims else None
    if newest is not None and one.round <= newest.epoch:
        yield f"{one.place} burns {one.round}", world.with_coordinator(one._replace(round=0))
        return
    ids = tuple(i for m in start.members for i in m.ids())
    wanted = build_wanted(world.current, world.gone, rules.least)
    proof = rounds.build_proof(newest, [build_report(s) for s in one.view], wanted)
    if rules.proof_needed and not runlog_rules.may_claim(claims, ids, proof, job_uid=JOB).ok:
        return
    if not rules.create_only or one.read == len(world.log):
        yield _claimed(world, one, start, rules)
        return
    burnt = one._replace(read=len(world.log), burnt=one.round, round=0)
    yield f"{one.place} finds place {one.read} taken", world.with_coordinator(burnt)


def _claimed(world: World, one: Coordinator, start: rounds.Start, rules: Rules) -> Move:
    known = world.entries(one.read)
    claims = [e for e in known if isinstance(e, Claim)]
    commit = runlog_rules.newest_resumable(known)
    if not rules.on_chain:
        commit = next((e for e in reversed(known) if isinstance(e, Commit)), None)
    entry = Claim(
        epoch=one.round,
        token=f"{one.place[0]}.{one.place[1]}.{one.round}",
        members=tuple(i for m in start.members for i in m.ids()),
        coordinator="",
        job_uid=JOB,
        job="ns/job",
        chain=runlog_rules.chain_of(claims, commit),
    )
    level = EpochLevel(
        number=entry.epoch,
        token=entry.token,
        stage=Stage.RUNNING,
        members=start.members,
        commit=commit,
        committed=commit.step if commit else 0,
    )
    log = _written(world, one, keep(entry), rules)
    opened = one._replace(read=len(log), round=0, kept=keep(level), saved=None)
    told = f"{one.place} claims epoch {entry.epoch} of {[m.slot for m in start.members]}"
    return told, world._replace(log=log).with_coordinator(opened)


def _written(world: World, one: Coordinator, entry: int, rules: Rules) -> tuple[int, ...]:
    return (*(world.log if rules.create_only else world.log[: one.read]), entry)


def _commit(world: World, one: Coordinator, rules: Rules) -> Iterator[Move]:
    level = one.level
    assert level is not None
    assert one.saved is not None
    epoch, step, history = one.saved
    entry = Commit(
        epoch=epoch,
        token=level.token,
        step=step,
        manifest=f"{epoch}-{step}-{level.token}",
        digest="",
    )
    known = world.entries(one.read)
    if entry in known:
        yield f"{one.place} finds its commit", _committed(world, one, step)
        return
    if not runlog_rules.may_append(entry, runlog_rules.newest_claim(known)).ok:
        yield f"{one.place} drops a save", world.with_coordinator(one._replace(saved=None))
        return
    if rules.create_only and one.read < len(world.log):
        return  # the place is taken: it reads on, and decides anew
    log = _written(world, one, keep(entry), rules)
    written = world._replace(
        log=log, content=tuple(sorted({**dict(world.content), entry.manifest: history}.items()))
    )
    heard = _committed(written, one._replace(read=len(log)), step)
    yield f"{one.place} commits step {step} of epoch {epoch}", heard
    if "answer" in world.faults:
        rest = _without(world.faults, "answer")
        yield "the answer to a commit is lost", written._replace(faults=rest)


def _committed(world: World, one: Coordinator, step: int) -> World:
    assert one.level is not None
    level = replace(one.level, committed=max(step, one.level.committed))
    return world.with_coordinator(one._replace(kept=keep(level), saved=None))


def _watch(world: World, one: Coordinator, rules: Rules) -> Iterator[Move]:
    """A running epoch: it breaks, it is suspected, or a step of it is saved."""
    level = one.level
    assert level is not None
    wanted = build_wanted(world.current, world.gone, rules.least)
    aged = [(build_report(s), 0.0) for s in one.view]
    found = breaks.find_break(level, aged, wanted, idle=0.0, hang=1e9)
    if found is not None or _out_of_reach(world, one):
        cut = replace(level, stage=Stage.CUT, cause=found.cause if found else "AgentLost")
        yield (
            f"{one.place} cuts epoch {level.number}",
            world.with_coordinator(one._replace(kept=keep(cut))),
        )
        return
    if one.saved is not None:
        return
    snaps = [s for s in one.view if s.epoch == level.number]
    held = min((s.step for s in snaps), default=0)
    if len(snaps) == len(level.members) and held > level.committed:
        history = _history_of(world, level, held)
        if history is not None:
            staged = one._replace(saved=(level.number, held, history))
            yield f"step {held} is staged", world.with_coordinator(staged)


def _history_of(world: World, level: EpochLevel, step: int) -> History | None:
    for member in level.members:
        pod = world.pod((member.slot, member.attempt))
        if pod is not None and pod.snap.epoch == level.number and len(pod.history) >= step:
            return pod.history[:step]
    return None


def _out_of_reach(world: World, one: Coordinator) -> bool:
    members = one.level.members if one.level else ()
    return not all(_reaches(world, one, (m.slot, m.attempt)) for m in members)


def _reaches(world: World, one: Coordinator, place: Place) -> bool:
    pod = world.pod(place)
    return pod is not None and pod.up and world.linked(one.place, place)


def _recover(world: World, one: Coordinator) -> Iterator[Move]:
    level = one.level
    assert level is not None
    members = {(m.slot, m.attempt) for m in level.members}
    heard = [(build_report(s), 0.0 if _reaches(world, one, s.place) else 1e9) for s in one.view]
    ranks = postmortem.list_ranks(
        level.members, heard, epoch=level.number, stale=5.0, gone=world.gone & members
    )
    waited = 100.0 if _has_heard_all(world, one, members) else 0.0
    decision = postmortem.decide_post_mortem(
        ranks, committed=level.committed, waited=waited, patience=8.0
    )
    if isinstance(decision, Saver):
        yield from _save(world, one, level, decision)
    elif isinstance(decision, postmortem.Nothing) and one.saved is None:
        over = one._replace(kept=keep(replace(level, stage=Stage.OVER, saver=None)))
        lost = frozenset(p for p in members if not _reaches(world, one, p))
        ended = world._replace(given_up=world.given_up | lost)
        yield f"epoch {level.number} is over", ended.with_coordinator(over)


def _has_heard_all(world: World, one: Coordinator, members: set[Place]) -> bool:
    """Patience is longer than any report takes: who can be reached has been heard when it is over."""
    pods = [world.pod(place) for place in members if _reaches(world, one, place)]
    return all(pod is not None and pod.snap in one.view for pod in pods)


def _save(world: World, one: Coordinator, level: EpochLevel, saver: Saver) -> Iterator[Move]:
    member = level.members[saver.rank]
    pod = world.pod((member.slot, member.attempt))
    ready = pod is not None and _reaches(world, one, pod.snap.place)
    if pod is None or not ready or pod.snap.work != PARKED or one.saved is not None:
        return
    if pod.snap.epoch == level.number and pod.snap.step == saver.step:
        saved = one._replace(saved=(level.number, saver.step, pod.history))
        yield f"{pod.snap.place} saves step {saver.step}", world.with_coordinator(saved)


# --- the operator and the faults ---------------------------------------------------------------------------


def _operate(world: World) -> Iterator[Move]:
    """What has gone for good is declared gone, and its slot gets the next attempt."""
    for slot, attempt in enumerate(world.current):
        pod = world.pod((slot, attempt))
        if pod is not None and not pod.up:
            yield f"the operator replaces slot {slot}", _replaced(world, slot)


def _replaced(world: World, slot: int) -> World:
    attempt = world.current[slot]
    current = (*world.current[:slot], attempt + 1, *world.current[slot + 1 :])
    fresh = Pod(Snap(slot, attempt + 1))
    return world._replace(current=current, gone=world.gone | {(slot, attempt)}).with_pod(fresh)


def _strike(world: World, rules: Rules) -> Iterator[Move]:
    for kind in dict.fromkeys(world.faults):
        rest = world._replace(faults=_without(world.faults, kind))
        for pod in world.pods:
            if pod.up:
                yield from _struck(rest, pod, kind, rules)
    for pair in world.links:
        yield f"{sorted(pair)} reach each other again", world._replace(links=world.links - {pair})


def _struck(world: World, pod: Pod, kind: str, rules: Rules) -> Iterator[Move]:
    place, snap = pod.snap.place, pod.snap
    if kind == "worker" and snap.work in LIVING:
        yield (
            f"the worker of {place} dies",
            world.with_pod(pod._replace(snap=snap._replace(work=DEAD))),
        )
    elif kind == "agent":
        again = Snap(snap.slot, snap.attempt, snap.incarnation + 1)
        if not rules.lives_count:
            again = again._replace(incarnation=snap.incarnation)
        yield (
            f"the agent of {place} starts again",
            world.without_coordinator(place).with_pod(Pod(again)),
        )
    elif kind == "node":
        yield (
            f"the node of {place} is lost",
            world.without_coordinator(place).with_pod(pod._replace(up=False)),
        )
    elif kind == "gone" and place[1] == world.current[place[0]]:
        yield f"{place} is declared gone too early", _replaced(world, place[0])
    elif kind == "link":
        for other in world.pods:
            if other.snap.place > place:
                pair = frozenset((place, other.snap.place))
                yield f"{sorted(pair)} lose each other", world._replace(links=world.links | {pair})
    elif kind == "duel" and all(c.place != place for c in world.coordinators):
        yield f"{place} coordinates, too", _with_role(world, pod, rules)


def _without(faults: tuple[str, ...], kind: str) -> tuple[str, ...]:
    at = faults.index(kind)
    return (*faults[:at], *faults[at + 1 :])


def start_world(slots: int, faults: tuple[str, ...]) -> World:
    pods = tuple(Pod(Snap(s, 1)) for s in range(slots))
    return World(pods=pods, current=(1,) * slots, faults=tuple(sorted(faults)))


__all__ = ["NONE", "Move", "Rules", "list_moves", "start_world"]
