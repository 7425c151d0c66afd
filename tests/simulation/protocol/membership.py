"""The model of a job's membership: its moves, its faults, what must always hold, its end."""

import itertools
from collections.abc import Iterator

from everstep_agent import runlog_rules
from everstep_contract.log import Claim, Commit, Done
from simulation.protocol import coordinators, pods
from simulation.protocol.coordinators import without
from simulation.protocol.rules import Move, Rules
from simulation.protocol.world import DEAD, IN, LIVING, OVER, Place, Pod, Snap, World, is_over

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
)
"""Killed worker; agent started again; node lost (the operator's word is true); declared gone though it
lives; two pods lose each other; one loses all others; one
stands still for a while; a rival coordinator; a PUT is applied and its
answer lost; a report comes a second time, later.
"""
SLOW = frozenset({"lays the role down", "is removed", "gets the next attempt"})
SLOW_KINDS = "claims with fewer", "claims at last", "gives up", "waits no longer"


class Membership:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def start(self, slots: int, faults: tuple[str, ...]) -> World:
        first = tuple(Pod(Snap(s, 1)) for s in range(slots))
        return World(pods=first, slots=slots, faults=tuple(sorted(faults)))

    def moves(self, world: World) -> list[Move]:
        """What happens by itself, the quick before the slow."""
        found = list(self._moves(world))
        found.sort(key=lambda m: m.kind in SLOW or m.kind.startswith(SLOW_KINDS))
        return found

    def _moves(self, world: World) -> Iterator[Move]:
        rules = self.rules
        awake = [p for p in world.pods if p.snap.place != world.paused]
        following = [(pod, pods.follows(world, pod)) for pod in awake]
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
            yield from pods.train(world, pod, rules)
            if place is None:
                yield from pods.take_role(world, pod, rules)
        yield from self._operate(world)

    def _operate(self, world: World) -> Iterator[Move]:
        """What has gone for good is declared gone, and its slot gets the next attempt; what was declared
        gone is removed.
        """
        for slot in range(world.slots):
            place = slot, world.current(slot)
            if world.pod(place) is None:
                yield Move("gets the next attempt", slot, place[1] + 1, _replaced(world, place))
        for pod in world.pods:
            if pod.snap.place in world.words:
                yield Move("is removed", pod.snap.place, None, _lost(world, pod))

    def events(self, world: World) -> list[Move]:
        """What may strike at any time; and the network that comes back."""
        found: list[Move] = []
        if world.links:
            found.append(
                Move("reach each other again", "all", None, world._replace(links=frozenset()))
            )
        if world.paused is not None:
            found.append(Move("goes on again", world.paused, None, world._replace(paused=None)))
        if world.late is not None:
            found.append(_late(world))
        for kind in dict.fromkeys(world.faults):
            rest = world._replace(faults=without(world.faults, kind))
            if kind == "late":
                found += _repeat(rest)
            for pod in world.pods:
                found += self._strike(rest, pod, kind)
        return found

    def _strike(self, world: World, pod: Pod, kind: str) -> Iterator[Move]:
        place, snap = pod.snap.place, pod.snap
        if kind == "worker" and snap.work in LIVING:
            dead = world.with_pod(pod._replace(snap=snap._replace(work=DEAD, held=0)))
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
            yield Move("is declared gone too early", place, None, _replaced(world, place))
        elif kind == "pause" and world.paused is None:
            yield Move("stands still", place, None, world._replace(paused=place))
        elif kind in ("link", "partition"):
            yield from _cut_off(world, pod, kind)
        elif kind == "duel" and world.coordinator(place) is None:
            yield Move("coordinates, too", place, None, pods.with_role(world, pod, self.rules))

    def is_done(self, world: World) -> bool:
        return any(isinstance(e, Done) for e in world.entries())

    def check(self, before: World, move: Move) -> str:
        return check(before, move)


def _lost(world: World, pod: Pod) -> World:
    return world.without_coordinator(pod.snap.place).with_pod(pod._replace(up=False))


def _replaced(world: World, place: Place) -> World:
    return world._replace(words=(*world.words, place)).with_pod(Pod(Snap(place[0], place[1] + 1)))


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
    """A report that was heard is on its way once more."""
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


# --- what must always hold --------------------------------------------------------------------------------


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
    return found or _ends_when_fenced(after)


def _never_rewritten(before: World, after: World) -> str:
    pairs = zip(before.log, after.log, strict=False)
    if len(after.log) < len(before.log) or any(new not in (old, 0) for old, new in pairs):
        return "the log was written over"
    return ""


def _one_lineage(world: World) -> str:
    """Each commit extends the one before it in what it trained."""
    commits = [e for e in world.entries() if isinstance(e, Commit)]
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
    """A claim leaves out a living member only if it was declared gone, or is outvoted and has not
    stepped; and does not resume behind one that its claimer reaches and nobody gave up.
    """
    claim = after.entries()[-1]
    former = [e for e in before.entries() if isinstance(e, Claim)]
    if not isinstance(claim, Claim) or not former:
        return ""
    resumed = claim.chain[-1].last_step if claim.chain else 0
    slot, attempt, _ = claim.token.split(".")
    claimer = int(slot), int(attempt)
    for pod in before.pods:
        held = pod.snap.epoch == former[-1].epoch and pod.snap.work in LIVING
        place = pod.snap.place
        stepped = held and pod.history[-1:] == (pod.snap.epoch,)
        reached = place not in before.words and before.linked(claimer, place)
        outvoted = not stepped and runlog_rules.holds_majority(former[-1], claim.members)
        if held and place not in after.words and not outvoted:
            return (
                f"epoch {claim.epoch} leaves out {place}, which lives in epoch {former[-1].epoch}"
            )
        if held and reached and place not in before.given_up and pod.snap.step > resumed:
            return f"{place} holds step {pod.snap.step}, epoch {claim.epoch} resumes at {resumed}"
    return ""


def _nothing_thrown_away(before: World, after: World) -> str:
    """A worker of the newest epoch is ended only when what it holds is committed."""
    entries = before.entries()
    newest = runlog_rules.newest_claim(entries)
    if newest is None:
        return ""
    for pod in before.pods:
        if pod.snap.work not in LIVING or pod.snap.epoch != newest.epoch or not pod.history:
            continue
        now = after.pod(pod.snap.place)
        if now is None or now.snap.work != OVER:
            continue
        if pod.snap.place in before.words or pod.snap.place in before.given_up:
            continue
        kept = [pods.read_history(e.digest) for e in entries if isinstance(e, Commit)]
        if all(held[: len(pod.history)] != pod.history for held in kept):
            return f"{pod.snap.place} is ended with step {pod.snap.step}, which is not committed"
    return ""


def _one_gang_steps(before: World, after: World) -> str:
    """While a newer epoch steps, nobody steps in another who was not declared gone; and the members of
    an epoch were all trained by the same steps.
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
            if not apart or other.history[-1] != other.snap.epoch:
                continue
            older = min(pod, other, key=lambda p: p.snap.epoch)
            if older.snap.place not in after.words:
                return f"{pod.snap.place} and {other.snap.place} step, in different gangs"
    return ""


def _token(pod: Pod) -> str:
    return pod.level.token if pod.level is not None else ""


def _ends_when_fenced(world: World) -> str:
    """Nobody trains on who has read a newer claim that names none of the gang."""
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
