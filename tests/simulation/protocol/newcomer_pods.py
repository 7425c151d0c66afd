"""Newcomers join a running epoch in place: what an invited pod does when it receives a level.

Copying the state is one move: the newcomer's worker has all of it, or nothing.
"""

from collections.abc import Iterator

from everstep_agent.peers.epoch_level import EpochLevel
from simulation.protocol.rules import Move
from simulation.protocol.world import HELD, IN, Pod, Snap, World


def enters(pod: Pod, level: EpochLevel | None) -> bool:
    """As `InPlaceJoin.find_place`, with the other conditions of `Pod._join_in_place`."""
    snap = pod.snap
    if level is None or level.in_place is None or not snap.ready or level.number < snap.joined:
        return False
    mine = level.member(snap.slot, snap.attempt, snap.incarnation)
    return mine is not None and mine.lives == (snap.life + 1,)


def enter(pod: Pod, level: EpochLevel) -> Pod:
    """Its worker becomes a member, with the state that it has copied."""
    snap = pod.snap._replace(
        work=IN, life=pod.snap.life + 1, epoch=level.number, step=len(pod.taken), ready=0, taken=-1,
        joined=level.number, promised=level.token, held=0,
    )  # fmt: skip
    return pod._replace(snap=snap, history=pod.taken, taken=())


def follow(pod: Pod, level: EpochLevel | None) -> Pod:
    """As `InPlaceJoin.follow`: the fresh worker gets ready, or it is replaced."""
    snap = pod.snap
    invited = level.joining if level is not None and level.live else ()
    mine = next((m for m in invited if m.id == (snap.slot, snap.attempt, snap.incarnation)), None)
    meant = mine is not None and mine.lives == (snap.life + 1,)
    if snap.ready and (level is None or not meant or snap.ready != level.number):
        recycled = snap._replace(life=snap.life + 1, ready=0, taken=-1)
        return pod._replace(snap=recycled, taken=())
    if meant and not snap.ready and snap.free and level is not None:
        return pod._replace(snap=snap._replace(ready=level.number))
    return pod


def take_state(world: World, pod: Pod) -> Iterator[Move]:
    """A member that holds hands its state to the newcomer."""
    snap, level = pod.snap, pod.level
    if level is None or not snap.ready or snap.ready != level.number or snap.taken >= 0:
        return
    for transfer in level.transfers:
        giving = level.members[transfer.giver]
        giver = world.pod((giving.slot, giving.attempt))
        if transfer.slot != snap.slot or giver is None:
            continue
        gives = giver.snap.epoch == level.number and giver.snap.work == HELD
        if gives and giver.level == level and world.linked(snap.place, giver.snap.place):
            taken = pod._replace(snap=snap._replace(taken=giver.snap.step), taken=giver.history)
            yield Move("takes the state of", snap.place, giver.snap.place, world.with_pod(taken))


def holds(snap: Snap, level: EpochLevel) -> bool:
    """Whether its worker stands at the boundary at which all hold for newcomers."""
    boundary = level.boundary
    confirmed = boundary is not None and boundary.hold and boundary.confirmed
    return confirmed and boundary is not None and snap.step == boundary.step
