"""Model of near saves: two pods on two nodes hold one copy of the model together. Once a near save
is kept, the loss of all processes or of either node leaves this save or a newer one complete.

The runtime's own `near_saves` and `keeping` decide what is kept.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from everstep_agent.checkpoint.keeping import Note, Save, add_saves
from everstep_agent.coordinator.near_saves import NearSaves
from everstep_contract.manifest import Chunk
from simulation.protocol.rules import Move

LAST = 4
PODS = 2


class Pod(NamedTuple):
    own: frozenset[int] = frozenset()
    """Steps whose near saves it holds."""
    told: int = 0
    """The newest kept step that it has heard of."""
    copies: frozenset[int] = frozenset()
    """Steps of which it holds the other pod's parts."""
    copied: int = 0
    """The newest of its steps of which the other pod holds a copy, as this pod reports it."""


class World(NamedTuple):
    kept: int = 0
    armed: int = 0
    pods: tuple[Pod, ...] = (Pod(),) * PODS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Near:
    """The rules. Each flag that is off makes a variant that must fail."""

    waits_for_copies: bool = True
    """A near save is kept only once it is in the partners' memory, too."""
    keeps_former: bool = True
    """A pod keeps the former near save until it hears that the newer one is kept."""

    def start(self) -> World:
        return World()

    def is_done(self, world: World) -> bool:
        return world.kept == LAST

    def events(self, world: World) -> list[Move]:
        return []

    def moves(self, world: World) -> list[Move]:
        return [*self._coordinate(world), *(m for i in range(PODS) for m in self._of_pod(world, i))]

    def check(self, before: World, move: Move) -> str:
        after: World = move.after
        if after.kept and not _is_held(frozenset.intersection(*(p.own for p in after.pods)), after):
            return f"all processes are lost, and no step from {after.kept} on is whole"
        for lost, pod in enumerate(after.pods):
            other = after.pods[1 - lost]
            if after.kept and not _is_held(other.own & other.copies, after):
                return f"node {lost} is lost, and no step from {after.kept} on is whole: {pod}"
        return ""

    def _coordinate(self, world: World) -> Iterator[Move]:
        if world.armed == world.kept < LAST:
            step = world.armed + 1
            yield Move("the coordinator arms", None, step, world._replace(armed=step))
        whole = frozenset.intersection(*(p.own for p in world.pods))
        copied = min(p.copied for p in world.pods) if self.waits_for_copies else None
        saves = NearSaves(made_at=0.0, kept=world.kept)
        saves.arm(world.armed, 0.0, 0.0)
        kept = saves.follow(
            max(whole, default=0), copied, stalled=lambda: 0.0, limit=math.inf, now=0.0
        )
        if kept > world.kept:
            yield Move("the coordinator keeps", None, kept, world._replace(kept=kept))

    def _of_pod(self, world: World, i: int) -> Iterator[Move]:
        pod, partner = world.pods[i], world.pods[1 - i]
        if world.armed > max(pod.own, default=0):
            own = pod.own | {world.armed}
            if not self.keeps_former:
                own = frozenset({world.armed})
            yield Move("makes", i, world.armed, _with(world, i, pod._replace(own=own)))
        if world.kept > pod.told:
            own = frozenset(step for step in pod.own if step >= world.kept)
            told = pod._replace(own=own, told=world.kept)
            yield Move("hears of", i, world.kept, _with(world, i, told))
        copies = _copy(partner.copies, pod.own, pod.told)
        if copies != partner.copies:
            yield Move("copies to", i, 1 - i, _with(world, 1 - i, partner._replace(copies=copies)))
        newest = max((s for s in pod.own if s in partner.copies), default=0)
        if newest > pod.copied:
            yield Move("reports", i, newest, _with(world, i, pod._replace(copied=newest)))


def _is_held(steps: frozenset[int], world: World) -> bool:
    return max(steps, default=0) >= world.kept


def _copy(there: frozenset[int], own: frozenset[int], since: int) -> frozenset[int]:
    notes = {"slot": _note(there)} if there else {}
    found = add_saves(notes, _note(own), since)
    return frozenset(save.step for note in found.values() for save in note.saves)


def _note(steps: frozenset[int]) -> Note:
    chunks = (Chunk(digest="d", key="", bytes=1),)
    saves = (Save(epoch=1, step=step, chunks=chunks) for step in sorted(steps))
    return Note(run="", owner="slot", saves=tuple(saves))


def _with(world: World, i: int, pod: Pod) -> World:
    return world._replace(pods=(*world.pods[:i], pod, *world.pods[i + 1 :]))
