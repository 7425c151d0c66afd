"""Which agent follows which, as the runtime's `choose_coordinator` and `choose_witness` decide it.

A pod asks its peers: the pods of the operator's newest list, and the members of the newest epoch
that it has heard of. The model leaves open whether a pod has already heard that it must leave, so
each pod is a candidate.
"""

from collections.abc import Iterable
from functools import lru_cache

from everstep_agent.peers.epoch_level import EpochLevel
from everstep_agent.peers.following import Answer, Choice, choose_coordinator, choose_witness
from everstep_agent.peers.messages import Who
from simulation.protocol.world import Coordinator, Place, Pod, World

FOREVER = 1e9
"""Seconds without a coordinator after which every agent's turn has come, even if peers report that
they still follow a coordinator.
"""


def follows(world: World, pod: Pod) -> Place | None:
    """The coordinator that a pod follows: itself if it has the role; otherwise the one that it
    already follows, while it reaches it; otherwise its choice.
    """
    place = pod.snap.place
    if not world.coordinators:
        return None
    if world.coordinator(place) is not None:
        return place
    if _still_follows(world, pod):
        return pod.follows
    choice = choose(world, pod, alone_for=0.0)
    return _to_place(choice.address) if choice.address and not choice.act else None


def choose(world: World, pod: Pod, *, alone_for: float) -> Choice:
    """The choice of an agent that follows no coordinator."""
    return _choose(_who(world, pod), _answers(world, pod, _peers(world, pod)), alone_for)


def has_rival(world: World, one: Coordinator) -> bool:
    """Whether another coordinator within reach precedes this one. This one's peers follow from the
    operator's messages (`words`) that it has received.
    """
    pod = world.pod(one.place)
    if len(world.coordinators) < 2 or pod is None or one.ended:
        return False
    known = world._replace(words=world.words[: one.words])
    peers = _peers(known, pod._replace(kept=one.kept))
    return not _choose(_who(world, pod), _answers(world, pod, peers), 0.0).act


def hear_witness(world: World, pod: Pod) -> EpochLevel | None:
    """The level of a peer that was in a newer epoch than this pod has heard of; None if there is
    none.
    """
    known = pod.level.number if pod.level else 0
    answers = _answers(world, pod, _peers(world, pod))
    address = choose_witness({a.address: a for a in answers}, known=known)
    witness = world.pod(_to_place(address)) if address else None
    return witness.level if witness is not None else None


def _still_follows(world: World, pod: Pod) -> bool:
    other = pod.follows
    found = other is not None and world.coordinator(other) is not None
    return found and other is not None and world.linked(pod.snap.place, other)


def _peers(world: World, pod: Pod) -> frozenset[Place]:
    """As `AgentState.peers`."""
    current = {(slot, world.current(slot)) for slot in range(world.slots + world.spares)}
    epoch = {(m.slot, m.attempt) for m in pod.level.members} if pod.level else set()
    return frozenset(current | epoch)


def _answers(world: World, pod: Pod, peers: Iterable[Place]) -> tuple[Answer, ...]:
    place = pod.snap.place
    others = [p for p in world.pods if p.snap.place in peers and p.snap.place != place]
    return tuple(
        _build_answer(p.snap.place, _who(world, p) if world.linked(place, p.snap.place) else None)
        for p in others
    )


def _who(world: World, pod: Pod) -> Who:
    one = world.coordinator(pod.snap.place)
    following = pod.follows if one is None and _still_follows(world, pod) else None
    return _build_who(pod.snap.place, pod.snap.epoch, one is not None and not one.ended, following)


@lru_cache(maxsize=1 << 12)
def _build_who(place: Place, epoch: int, acting: bool, following: Place | None) -> Who:
    coordinator = _to_address(following) if following else ""
    return Who(slot=place[0], attempt=place[1], acting=acting, epoch=epoch, coordinator=coordinator)


@lru_cache(maxsize=1 << 12)
def _build_answer(place: Place, who: Who | None) -> Answer:
    return Answer(slot=place[0], attempt=place[1], address=_to_address(place), who=who)


@lru_cache(maxsize=1 << 14)
def _choose(me: Who, answers: tuple[Answer, ...], alone_for: float) -> Choice:
    address = _to_address((me.slot, me.attempt))
    return choose_coordinator(me, address, {a.address: a for a in answers}, alone_for=alone_for)


def _to_address(place: Place) -> str:
    return f"{place[0]}-{place[1]}"


def _to_place(address: str) -> Place:
    slot, _, attempt = address.partition("-")
    return int(slot), int(attempt)
