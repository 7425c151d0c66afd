"""Newcomers join a running epoch in place: what the coordinator does from the invitation to the claim.
The runtime's own functions decide. A newcomer is another pod, or the pod of a member that lost its
worker. A member that is to leave ends at the boundary at which its replacement joins, or when its notice ends.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from everstep_agent.coordinator import join_rules, members, rounds, transfer_rules
from everstep_agent.peers.agent_report import AgentReport, WorkerReport
from everstep_agent.peers.epoch_level import Boundary, EpochLevel, EpochMember, Id
from everstep_agent.peers.places import with_newcomers
from everstep_contract.wire import Standing
from simulation.protocol import in_place, step_first
from simulation.protocol.orders import reaches, wanted_by
from simulation.protocol.rules import Move, Rules
from simulation.protocol.world import (
    IN,
    Coordinator,
    World,
    build_report,
    keep,
)

TIRED = "goes on without its newcomers, in epoch"
"""A move that takes seconds: a newcomer's transfer makes no progress for the time limit."""
LATE = "lets leave, as its notice ends,"
"""A move that takes seconds."""


def invite(world: World, one: Coordinator, level: EpochLevel, rules: Rules) -> Iterator[Move]:
    """As `invitations.invite`, and the boundary that follows it."""
    recent, leaving = _recent(world, one), list_leaving(world, one, level)
    busy = level.boundary is not None or level.leaving or one.stop
    if busy or (one.leave and not leaving) or not join_rules.can_join(level, recent):
        return
    if not {m.id for m in level.members} <= {r.id for r in recent}:
        return
    ready = join_rules.list_ready(level, rounds.list_eligible(recent, wanted_by(world, one, rules)))
    missing = world.slots - len(level.members) + len(leaving)
    joining = join_rules.plan_invitation(level, ready, missing=missing)
    if joining != level.joining:
        invited = one._replace(kept=keep(replace(level, joining=joining)))
        slots = tuple(m.slot for m in joining)
        yield Move("invites", one.place, slots, world.with_coordinator(invited))
    elif join_rules.are_prepared(joining, recent) and not level.unclaimed and not world.away:
        if leaving and not rules.leave_held:
            yield _let_leave(world, one, level, leaving)
        elif level.committed or not leaving:
            yield from _hold_all(world, one, level, rules)


def list_leaving(world: World, one: Coordinator, level: EpochLevel) -> tuple[Id, ...]:
    """As `leave_in_place.list_leaving`, if others stay."""
    found = tuple(m.id for m in level.members if (m.slot, m.attempt) == one.leave)
    asked = one.leave is not None and one.leave not in world.words
    return found if asked and len(level.members) > 1 else ()


def _let_leave(world: World, one: Coordinator, level: EpochLevel, leaving: tuple[Id, ...]) -> Move:
    told = one._replace(kept=keep(replace(level, leaving=leaving)))
    return Move("lets leave", one.place, one.leave, world.with_coordinator(told))


def _leave_at_once(world: World, one: Coordinator, level: EpochLevel) -> Iterator[Move]:
    """As `leave_in_place.leave_at_once`, beside the boundary at which all are to hold."""
    if leaving := list_leaving(world, one, level):
        yield _let_leave(world, one, level, leaving)._replace(kind=LATE)


def _hold_all(world: World, one: Coordinator, level: EpochLevel, rules: Rules) -> Iterator[Move]:
    """As `orders.halt`: all members agree on the boundary at once (see `boundary.py`)."""
    inside = [world.pod((m.slot, m.attempt)) for m in level.members]
    steps = [
        p.snap.step for p in inside if p and p.snap.work == IN and p.snap.epoch == level.number
    ]
    if len(steps) < len(inside) or max(steps) >= rules.steps:
        return
    held = replace(level, boundary=Boundary(step=max(steps), stay=False, hold=True, confirmed=True))
    after = world.with_coordinator(one._replace(kept=keep(held)))
    for pod in inside:
        assert pod is not None
        after = after.with_pod(pod._replace(kept=keep(held)))
    yield Move("agrees with all to hold at", one.place, max(steps), after)


def admit(world: World, one: Coordinator, level: EpochLevel, rules: Rules) -> Iterator[Move]:
    """As `join.admit`, once every member holds at the boundary."""
    recent = _recent(world, one)
    workers = members.list_workers(level, [build_report(s) for s in one.view])
    if not (level.leaving and level.transfers) and not join_rules.are_held(level, workers):
        if not (level.leaving or level.transfers):
            yield from _leave_at_once(world, one, level)
        return
    if not level.transfers:
        begun = replace(
            in_place.propose(world, one, level, rules),
            transfers=transfer_rules.plan_transfers(
                level, str(level.number), list_leaving(world, one, level)
            ),
        )
        asked = world.with_coordinator(one._replace(kept=keep(begun)))
        yield Move("has the state handed over", one.place, level.number, asked)
        return
    proposed = in_place.propose(world, one, level, rules)
    if proposed != level:
        asked = world.with_coordinator(one._replace(kept=keep(proposed)))
        yield Move("asks to join", one.place, proposed.successor, asked)
        return
    assert level.boundary is not None
    if rules.join_first and not join_rules.have_joined(level, recent):
        return
    taken = transfer_rules.list_taken(level.joining, recent, level.boundary.step)
    failed = transfer_rules.find_lost(level.joining, recent)
    waits = any(m not in taken and m.id not in failed for m in level.joining)
    if taken == level.joining and taken and not rules.newcomers_claim_first:
        yield _step_first(world, one, level, taken, workers, rules)
        return
    if world.away:
        yield from _go_on_without(world, one, level, workers, waits, rules)
        return
    if not in_place.may_claim_now(world, one, level):
        return
    if not rules.take_first:
        taken, waits = level.joining, False
    leaving = list_leaving(world, one, level)
    if leaving and not level.leaving:
        move = _let_leave(world, one, level, leaving)
        yield move._replace(kind=TIRED) if waits else move
        return
    lost = members.list_lost(level, recent, step_first.list_gone(world, one, rules))
    if not join_rules.have_left(level, recent, lost):
        return
    for move in _claim(world, one, level, taken, workers, rules):
        yield move._replace(kind=TIRED) if waits else move


def _go_on_without(
    world: World,
    one: Coordinator,
    level: EpochLevel,
    workers: Sequence[WorkerReport],
    waits: bool,
    rules: Rules,
) -> Iterator[Move]:
    """The store does not answer: the members that stay step first, without newcomers."""
    staying, reports = join_rules.list_staying(level), [build_report(s) for s in one.view]
    lost = members.list_lost(level, reports, step_first.list_gone(world, one, rules))
    asked = not list_leaving(world, one, level) or bool(level.leaving)
    there = join_rules.have_joined(level, _recent(world, one))
    if not (asked and there and join_rules.have_left(level, reports, lost)):
        return
    if step_first.why_claim_first(world, one, level, staying, rules):
        return
    move = _step_first(world, one, level, (), workers, rules)
    kind = "goes on without newcomers, unclaimed, as epoch"
    yield move._replace(kind=TIRED if waits else kind)


def _claim(
    world: World,
    one: Coordinator,
    level: EpochLevel,
    joining: Sequence[EpochMember],
    workers: Sequence[WorkerReport],
    rules: Rules,
) -> Iterator[Move]:
    named, applied, following = _plan(one, level, joining, workers)
    yield from in_place.claim(world, one, level, named, applied, following, rules)


def _step_first(
    world: World,
    one: Coordinator,
    level: EpochLevel,
    joining: Sequence[EpochMember],
    workers: Sequence[WorkerReport],
    rules: Rules,
) -> Move:
    """The claim follows. With newcomers this is a variant."""
    named, applied, following = _plan(one, level, joining, workers)
    return step_first.begin(world, one, level, named, applied, following, rules)


def _plan(
    one: Coordinator,
    level: EpochLevel,
    joining: Sequence[EpochMember],
    workers: Sequence[WorkerReport],
) -> tuple[Sequence[EpochMember], int, Callable[[int, str], EpochLevel]]:
    """The next epoch's members, the step that it continues, and how it is built."""
    standings = _list_standings(one, level)

    def following(number: int, token: str) -> EpochLevel:
        return join_rules.continue_epoch(level, joining, standings, number=number, token=token)

    applied = max(w.standing.applied for w in workers if w.standing is not None)
    return with_newcomers(join_rules.list_staying(level), joining), applied, following


def _list_standings(one: Coordinator, level: EpochLevel) -> dict[int, Standing]:
    return join_rules.list_standings(level, [build_report(s) for s in one.view])


def _recent(world: World, one: Coordinator) -> list[AgentReport]:
    return [build_report(s) for s in one.view if reaches(world, one, s.place)]
