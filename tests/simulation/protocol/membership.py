"""Model of a job's membership: its moves, its faults, its end."""

from collections.abc import Iterator

from everstep_agent.runlog import rules as runlog_rules
from everstep_contract.log import Claim, Done
from simulation.protocol import coordinators, newcomer_pods, newcomers, pods
from simulation.protocol.in_place import GIVES_UP
from simulation.protocol.invariants import check
from simulation.protocol.log_moves import without
from simulation.protocol.orders import replaced
from simulation.protocol.peers import follows
from simulation.protocol.rules import BACK, TURN, Move, Rules
from simulation.protocol.world import DEAD, LIVING, Place, Pod, Snap, World

KINDS = (
    "worker",
    "agent",
    "node",
    "gone",
    "link",
    "partition",
    "pause",
    "duel",
    "answer",
    "late",
    "stop",
    "leave",
    "store",
    "yield",
)
"""In this order: a worker is killed; an agent is started again; a node is lost, and the operator
rightly declares its pod gone; a pod is declared gone although it still runs; two pods lose their
connection; one pod is cut off from all others; one pod stands still for a while; a rival
coordinator appears; a PUT is applied but its answer is lost; a report arrives a second time, later;
the operator wants the job to save and stop; the operator wants one pod to save and leave; the store
does not answer for a while; a silent pod may be left out although it still runs.
"""
SLOW = frozenset({TURN, "lays the role down", "is removed", "gets the next attempt"})
SLOW_KINDS = (
    "claims with fewer",
    "claims at last",
    "gives up",
    GIVES_UP,
    newcomers.TIRED,
    newcomers.LATE,
    "waits no longer",
)


def _is_slow(move: Move) -> bool:
    return move.kind in SLOW or move.kind.startswith(SLOW_KINDS)


class Membership:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def start(self, slots: int, faults: tuple[str, ...], spares: int = 0) -> World:
        first = tuple(Pod(Snap(s, 1)) for s in range(slots + spares))
        return World(pods=first, slots=slots, spares=spares, faults=tuple(sorted(faults)))

    def moves(self, world: World) -> list[Move]:
        """What can happen without a fault; quick moves come before slow ones."""
        found = list(self._moves(world))
        found.sort(key=_is_slow)
        return found

    def first_move(self, world: World) -> Move | None:
        """The first of `moves`, without building most of the others."""
        slow = None
        for move in self._moves(world):
            if not _is_slow(move):
                return move
            slow = slow or move
        return slow

    def _moves(self, world: World) -> Iterator[Move]:
        rules = self.rules
        awake = [p for p in world.pods if p.snap.place != world.paused]
        following = [(pod, follows(world, pod)) for pod in awake]
        for pod, place in following:
            one = world.coordinator(place) if place is not None else None
            if one is not None:
                yield from pods.tell(world, pod, one, rules)
        acting = [c for c in world.coordinators if c.place != world.paused]
        for one in acting:
            yield from coordinators.hear(world, one)
        for one in acting:
            yield from coordinators.coordinate(world, one, rules)
        for pod, place in following:
            yield from newcomer_pods.take_state(world, pod)
            yield from pods.train(world, pod, rules)
            if place is None:
                yield from pods.take_role(world, pod, rules)
        yield from self._operate(world)

    def _operate(self, world: World) -> Iterator[Move]:
        """The operator declares a lost pod gone and creates its slot's next attempt. It removes a
        pod that was declared gone.
        """
        for slot in range(world.slots + world.spares):
            place = slot, world.current(slot)
            if world.pod(place) is None:
                yield Move("gets the next attempt", slot, place[1] + 1, replaced(world, place))
        for slot, attempt, epoch in sorted(world.yields):
            place, newest = (slot, attempt), runlog_rules.newest_claim(world.entries())
            left_out = newest is not None and newest.epoch > epoch and not names(newest, place)
            if left_out and world.current(slot) == attempt:
                yield Move("gets the next attempt", slot, attempt + 1, replaced(world, place))
        for pod in world.pods:
            if pod.snap.place in world.words:
                yield Move("is removed", pod.snap.place, None, _lost(world, pod))

    def events(self, world: World) -> list[Move]:
        """Faults, which may strike at any time, and the ends of faults that pass by themselves."""
        found: list[Move] = []
        if world.links:
            found.append(
                Move("reach each other again", "all", None, world._replace(links=frozenset()))
            )
        if world.paused is not None:
            found.append(Move("goes on again", world.paused, None, world._replace(paused=None)))
        if world.late is not None:
            found.append(_late(world))
        if world.away:
            found.append(Move(BACK, "the store", None, world._replace(away=False)))
        for kind in dict.fromkeys(world.faults):
            rest = world._replace(faults=without(world.faults, kind))
            if kind == "store" and not world.away:
                found.append(Move("does not answer", "the store", None, rest._replace(away=True)))
            if kind == "late":
                found += _repeat(rest)
            if kind == "stop":
                found.append(Move("is to stop", "job", None, rest._replace(stop=True)))
            for pod in world.pods:
                found += self._strike(rest, pod, kind)
        return found

    def _strike(self, world: World, pod: Pod, kind: str) -> Iterator[Move]:
        place, snap = pod.snap.place, pod.snap
        if kind == "worker" and snap.work in LIVING:
            dead = world.with_pod(pod._replace(snap=snap._replace(work=DEAD, held=0), own=0))
            yield Move("loses its worker", place, None, dead)
        elif kind == "agent":
            incarnation = snap.incarnation + (1 if self.rules.incarnations_count else 0)
            again = Pod(Snap(snap.slot, snap.attempt, incarnation))
            yield Move(
                "is started again", place, None, world.without_coordinator(place).with_pod(again)
            )
        elif kind == "node":
            yield Move("is lost with its node", place, None, _lost(world, pod))
        elif kind == "gone" and place not in world.words:
            yield Move("is declared gone too early", place, None, replaced(world, place))
        elif kind == "yield" and place not in world.words:
            newest = runlog_rules.newest_claim(world.entries())
            if newest is not None and _is_silent(world, newest, place):
                given = world.yields | {(*place, newest.epoch)}
                yield Move("may be left out", place, None, world._replace(yields=given))
        elif kind == "leave" and world.leave is None and place not in world.words:
            yield Move("is to leave", place, None, world._replace(leave=place))
        elif kind == "pause" and world.paused is None:
            yield Move("stands still", place, None, world._replace(paused=place))
        elif kind in ("link", "partition"):
            yield from _cut_off(world, pod, kind)
        elif kind == "duel" and world.coordinator(place) is None:
            yield Move("coordinates, too", place, None, pods.with_role(world, pod, self.rules))

    def is_done(self, world: World) -> bool:
        stopped = any(one.ended == "stopped" for one in world.coordinators)
        return stopped or any(isinstance(e, Done) for e in world.entries())

    def check(self, before: World, move: Move) -> str:
        return check(before, move)


def names(claim: Claim, place: Place) -> bool:
    return any((m.slot, m.attempt) == place for m in claim.members)


def _is_silent(world: World, newest: Claim, place: Place) -> bool:
    """Whether a coordinator of the claimed epoch reports this member as silent to the operator."""
    running = [c for c in world.coordinators if c.number == newest.epoch and names(newest, place)]
    return any(not world.linked(c.place, place) for c in running)


def _lost(world: World, pod: Pod) -> World:
    return world.without_coordinator(pod.snap.place).with_pod(pod._replace(up=False))


def _cut_off(world: World, pod: Pod, kind: str) -> Iterator[Move]:
    place = pod.snap.place
    others = [p.snap.place for p in world.pods if p.snap.place != place]
    if kind == "partition":
        pairs = {(min(place, o), max(place, o)) for o in others}
        yield Move("is cut off", place, None, world._replace(links=world.links | pairs))
        return
    for other in others:
        if other > place:
            cut = world._replace(links=world.links | {(place, other)})
            yield Move("loses sight of", place, other, cut)


def _repeat(world: World) -> Iterator[Move]:
    """A report that was already heard is sent once more."""
    for one in world.coordinators:
        for snap in one.view:
            again = world._replace(late=(one.place, snap))
            yield Move("has a report repeated of", one.place, snap.place, again)


def _late(world: World) -> Move:
    assert world.late is not None
    place, snap = world.late
    after, one = world._replace(late=None), world.coordinator(place)
    if one is not None:
        view = tuple(sorted([*(s for s in one.view if s[:2] != snap[:2]), snap]))
        after = after.with_coordinator(one._replace(view=view))
    return Move("hears, late, of", place, snap.place, after)
