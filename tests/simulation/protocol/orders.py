"""The operator's orders, and how a coordinator carries them out: the job must stop, or a pod must
leave.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from everstep_agent.coordinator import rounds, seen_document
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import Boundary, EpochLevel, Stage
from everstep_agent.runlog import rules as runlog_rules
from everstep_contract import levels
from simulation.protocol.invariants import LEFT
from simulation.protocol.peers import follows
from simulation.protocol.pods import tell
from simulation.protocol.rules import JOB, Move, Rules
from simulation.protocol.world import (
    IN,
    Coordinator,
    Orders,
    Place,
    Pod,
    Snap,
    World,
    build_report,
    build_wanted,
    keep,
)


def halt(world: World, one: Coordinator, level: EpochLevel) -> Iterator[Move]:
    """All members agree on a boundary and halt there (see `boundary.py`). Once that step is
    committed, the epoch ends; if the order was to stop, the job has stopped.
    """
    if level.boundary is not None:
        if level.committed >= level.boundary.step:
            over = one._replace(kept=keep(replace(level, stage=Stage.OVER, boundary=None)))
            ended = Move(
                "ends, halted, epoch", one.place, level.number, world.with_coordinator(over)
            )
            yield stopped(world, over) if one.stop else ended
        return
    members = [world.pod((m.slot, m.attempt)) for m in level.members]
    if any(p is None or p.snap.work != IN or p.snap.epoch != level.number for p in members):
        return
    furthest = max(p.snap.step for p in members if p is not None)
    halted = replace(level, boundary=Boundary(step=furthest, stay=True, confirmed=True))
    after = world.with_coordinator(one._replace(kept=keep(halted)))
    for pod in members:
        assert pod is not None
        after = after.with_pod(pod._replace(kept=keep(halted)))
    yield Move("agrees with all to halt at", one.place, furthest, after)


def must_leave(world: World, one: Coordinator, level: EpochLevel) -> bool:
    inside = {one.place, *((m.slot, m.attempt) for m in level.members)}
    return one.leave is not None and one.leave in inside and one.leave not in world.words


def let_go(world: World, one: Coordinator, place: Place, rules: Rules) -> Iterator[Move]:
    """Once the pod holds nothing that the store lacks, the operator removes it, and its slot's next
    attempt follows.
    """
    claim = runlog_rules.newest_claim(world.entries(one.read))
    if rules.ask_first and (one.read < len(world.log) or world.away):
        return
    wanted, reports = wanted_by(world, one, rules), [build_report(s) for s in one.view]
    unheard = rounds.list_unheard(claim, one.number, reports, wanted, job_uid=JOB)
    known = unheard if rules.ask_first else frozenset()
    left = seen_document.build_left(
        wanted, reports, one.level, None, (), known, coordinator=one.place
    )
    if any((x.slot, x.attempt) == place for x in left):
        yield Move(LEFT, one.place, place, replaced(world, place))


def nobody_unheard(
    world: World, one: Coordinator, reports: Sequence[AgentReport], rules: Rules
) -> bool:
    """Whether the job may stop, judged with the newest log entry: if no pod possibly holds unsaved
    state, or once the wait for such pods has ended. The wait begins again when such a pod reports.
    So when it ends, each of them within reach follows this coordinator, has received its newest
    level, and has answered.
    """
    if one.read < len(world.log) or world.away:
        return False
    claim = runlog_rules.newest_claim(world.entries(one.read))
    wanted = build_wanted(world.words[: one.words], world.slots, 1)
    unheard = rounds.list_unheard(claim, one.number, reports, wanted, job_uid=JOB)
    pods = [world.pod(place) for place in unheard if reaches(world, one, place)]
    return all(pod is not None and _has_answered(world, one, pod, rules) for pod in pods)


def _has_answered(world: World, one: Coordinator, pod: Pod, rules: Rules) -> bool:
    settled = follows(world, pod) == one.place and not any(tell(world, pod, one, rules))
    return pod.snap in one.view and (settled or not rules.hear_out)


def stopped(world: World, one: Coordinator) -> Move:
    return Move("stops", one.place, None, world.with_coordinator(one._replace(ended="stopped")))


def has_heard_all(world: World, one: Coordinator, members: set[Place]) -> bool:
    """Whether all members within reach have been heard. The coordinator waits longer than any
    report takes, so this holds when its wait has ended.
    """
    pods = [world.pod(place) for place in members if reaches(world, one, place)]
    return all(pod is not None and pod.snap in one.view for pod in pods)


def reaches(world: World, one: Coordinator, place: Place) -> bool:
    return world.pod(place) is not None and world.linked(one.place, place)


def wanted_by(world: World, one: Coordinator, rules: Rules) -> levels.Wanted:
    return build_wanted(*orders_heard(world, one, rules))


def orders_heard(world: World, one: Coordinator, rules: Rules) -> Orders:
    """The arguments of `build_wanted`, as far as this coordinator has heard them."""
    return world.words[: one.words], world.slots, rules.least, one.leave, one.yields


def replaced(world: World, place: Place) -> World:
    """The pod is declared gone, and its slot's next attempt exists."""
    return world._replace(words=(*world.words, place)).with_pod(Pod(Snap(place[0], place[1] + 1)))
