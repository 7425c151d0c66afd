"""Model of saves in memory and their copies: two pods on two nodes, each with a part that the other
does not have. Once a commit is copied, it stays complete after the loss of either node. No save off
the chain of the current epoch is kept or committed.

The runtime's own `keeping` and `decide_unfinished` decide what a pod keeps. All pods are killed at
once; a pod whose node is lost comes back with an empty memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from everstep_agent.checkpoint.keeping import (
    Note,
    Resumed,
    Save,
    add_saves,
    continues,
    list_kept,
    rewind,
)
from everstep_agent.coordinator.unfinished import decide_unfinished
from everstep_agent.peers.agent_report import AgentReport, UnsentSave
from everstep_contract.log import Claim, MemberId
from everstep_contract.manifest import Chunk
from simulation.protocol.rules import Move

LAST = 3
SLOTS = 2
ROOM = 2
"""Number of its own saves for which a pod has room."""
Key = tuple[int, int]
"""(epoch, step)"""
NOTHING: Key = (0, 0)


class Pod(NamedTuple):
    step: int = 0
    knows: int = 0
    """Step of the newest commit that it has heard of."""
    own: frozenset[Key] = frozenset()
    """Its staged saves."""
    notes: frozenset[tuple[str, Key]] = frozenset()
    """(owner, key) of the saves that it holds for others, or has restored."""


class World(NamedTuple):
    epoch: int = 1
    resumed: Key = NOTHING
    """The commit from which the current epoch continues."""
    commits: tuple[Key, ...] = ()
    safe: Key = NOTHING
    """The newest commit that was in two memories, part by part."""
    pods: tuple[Pod, ...] = (Pod(),) * SLOTS
    kills: int = 2
    losses: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Keeping:
    """The rules. Each flag that is off makes a variant that must fail."""

    until_committed: bool = True
    """A copy stays until a newer save is committed, not only until one is staged."""
    rewinds: bool = True
    """At an epoch change, saves beyond the resumed commit are deleted."""
    by_digest: bool = True
    """A restore uses the commit's chunks, not the newest copy."""

    def start(self) -> World:
        return World()

    def is_done(self, world: World) -> bool:
        return bool(world.commits) and world.commits[-1][1] == LAST

    def moves(self, world: World) -> list[Move]:
        return [*self._commit(world), *(m for i in range(SLOTS) for m in self._of_pod(world, i))]

    def events(self, world: World) -> list[Move]:
        found = []
        if world.kills:
            less = world._replace(kills=world.kills - 1)
            found.append(Move("all are killed", None, None, self._restart(less)))
        for i in range(SLOTS if world.kills and world.losses else 0):
            empty = _with(world, i, world.pods[i]._replace(own=frozenset(), notes=frozenset()))
            less = empty._replace(kills=world.kills - 1, losses=world.losses - 1)
            found.append(Move("all are killed, and lost is node", None, i, self._restart(less)))
        return found

    def check(self, before: World, move: Move) -> str:
        after: World = move.after
        for old, new in zip(after.commits, after.commits[1:], strict=False):
            if new[1] <= old[1] or new[0] < old[0]:
                return f"{new} is committed after {old}"
        if after.commits and after.commits[-1][0] < after.resumed[0]:
            return f"{after.commits[-1]} is committed, and the run continued from {after.resumed}"
        for i, pod in enumerate(after.pods):
            for key in {*pod.own, *(k for _, k in pod.notes)}:
                if self._is_void(after, i, key):
                    return f"pod {i} holds {key}, and the run continued from {after.resumed}"
        return self._find_loss(after)

    def _is_void(self, world: World, i: int, key: Key) -> bool:
        return key[0] < world.epoch and not continues(_save(i, key), _resumed(world.resumed))

    def _find_loss(self, world: World) -> str:
        newest = world.commits[-1] if world.commits else NOTHING
        if newest != world.safe or newest == NOTHING:
            return ""
        for lost in range(SLOTS):
            left = [_list_parts(i, pod) for i, pod in enumerate(world.pods) if i != lost]
            for part in range(SLOTS):
                if not any(self._restores(held.get(part, set()), newest) for held in left):
                    return f"without node {lost} nobody has part {part} of {newest}"
        return ""

    def _restores(self, held: set[Key], wanted: Key) -> bool:
        if self.by_digest:
            return wanted in held
        return max(held, key=lambda k: k[1], default=NOTHING) == wanted

    def _of_pod(self, world: World, i: int) -> Iterator[Move]:
        pod = world.pods[i]
        together = pod.step == min(p.step for p in world.pods)
        room = ROOM - sum(not self._is_void(world, i, key) for key in pod.own)
        if together and pod.step < LAST and room > 0:
            staged = pod._replace(step=pod.step + 1, own=pod.own | {(world.epoch, pod.step + 1)})
            yield Move("stages", i, pod.step + 1, _with(world, i, staged))
        newest = world.commits[-1][1] if world.commits else 0
        if newest > pod.knows:
            own = frozenset(k for k in pod.own if k[1] >= newest)
            yield Move("hears of", i, newest, _with(world, i, pod._replace(knows=newest, own=own)))
        partner = (i + 1) % SLOTS
        copied = self._take(world.pods[partner], i, pod) if pod.own else world.pods[partner]
        if copied != world.pods[partner]:
            yield Move("copies to", i, partner, _note_safe(_with(world, partner, copied)))

    def _take(self, partner: Pod, owner: int, pod: Pod) -> Pod:
        """The partner, after it has copied the saves of `owner`."""
        saves = tuple(_save(owner, key) for key in sorted(pod.own, key=lambda k: k[1]))
        since = pod.knows if self.until_committed else max(s.step for s in saves)
        note = Note(run="", owner=f"slot-{owner}", saves=saves)
        return partner._replace(notes=_to_keys(add_saves(_to_notes(partner), note, since)))

    def _commit(self, world: World) -> Iterator[Move]:
        ready = frozenset.intersection(*(pod.own for pod in world.pods))
        newest = world.commits[-1][1] if world.commits else 0
        for key in sorted(k for k in ready if k[0] == world.epoch and k[1] > newest):
            after = world._replace(commits=(*world.commits, key))
            yield Move("the coordinator commits", None, key, _note_safe(after))

    def _restart(self, world: World) -> World:
        """All pods come back: what all of them had staged is committed, and the next epoch
        continues from the newest commit.
        """
        world = self._finish(world)
        resumed = world.commits[-1] if world.commits else NOTHING
        pods = tuple(self._enter(i, pod, resumed) for i, pod in enumerate(world.pods))
        return _note_safe(world._replace(epoch=world.epoch + 1, resumed=resumed, pods=pods))

    def _finish(self, world: World) -> World:
        committed = world.commits[-1][1] if world.commits else 0
        found = decide_unfinished(_claim(world.epoch), committed, _list_reports(world))
        if found is None:
            return world
        return world._replace(commits=(*world.commits, (world.epoch, found[1])))

    def _enter(self, i: int, pod: Pod, resumed: Key) -> Pod:
        own, notes = pod.own, _to_notes(pod)
        if self.rewinds:
            own = frozenset(k for k in own if continues(_save(i, k), _resumed(resumed)))
            notes = rewind(notes, _resumed(resumed))
        if resumed != NOTHING:
            save = Save(epoch=resumed[0], step=resumed[1], chunks=_chunks(resumed, *range(SLOTS)))
            notes = add_saves(notes, Note(run="", owner="restore", saves=(save,)), resumed[1])
        own = frozenset(k for k in own if k[1] >= resumed[1])
        return Pod(step=resumed[1], knows=resumed[1], own=own, notes=_to_keys(notes))


def _resumed(key: Key) -> Resumed:
    return Resumed(epoch=key[0], step=key[1])


def _claim(epoch: int) -> Claim:
    members = tuple(
        MemberId(slot=slot, attempt=0, incarnation=epoch, rank=0, life=1) for slot in range(SLOTS)
    )
    return Claim(epoch=epoch, token="", members=members, coordinator="", job_uid="", job="")


def _list_reports(world: World) -> list[AgentReport]:
    return [
        AgentReport(
            slot=i,
            attempt=0,
            incarnation=world.epoch + 1,
            address="",
            unsent=tuple(UnsentSave(epoch=e, step=s, rank=i) for e, s in sorted(pod.own)),
        )
        for i, pod in enumerate(world.pods)
    ]


def _chunks(key: Key, *parts: int) -> tuple[Chunk, ...]:
    return tuple(Chunk(digest=f"{part}/{key[0]}/{key[1]}", key="", bytes=1) for part in parts)


def _save(part: int, key: Key) -> Save:
    return Save(epoch=key[0], step=key[1], chunks=_chunks(key, part))


def _to_notes(pod: Pod) -> dict[str, Note]:
    found: dict[str, Note] = {}
    for owner, key in sorted(pod.notes):
        parts = range(SLOTS) if owner == "restore" else [int(owner.removeprefix("slot-"))]
        save = Save(epoch=key[0], step=key[1], chunks=_chunks(key, *parts))
        held = found[owner].saves if owner in found else ()
        found[owner] = Note(run="", owner=owner, saves=(*held, save))
    return found


def _to_keys(notes: dict[str, Note]) -> frozenset[tuple[str, Key]]:
    return frozenset((owner, save.key) for owner, note in notes.items() for save in note.saves)


def _list_parts(i: int, pod: Pod) -> dict[int, set[Key]]:
    """Part → the saves of which this pod has that part."""
    digests = {c.digest for key in pod.own for c in _chunks(key, i)} | list_kept(_to_notes(pod))
    found: dict[int, set[Key]] = {}
    for digest in digests:
        part, epoch, step = map(int, digest.split("/"))
        found.setdefault(part, set()).add((epoch, step))
    return found


def _note_safe(world: World) -> World:
    """Note the newest commit as safe if each of its parts is in both memories."""
    if not world.commits:
        return world
    newest, held = world.commits[-1], [_list_parts(i, p) for i, p in enumerate(world.pods)]
    whole = all(newest in found.get(part, ()) for found in held for part in range(SLOTS))
    return world._replace(safe=newest) if whole else world


def _with(world: World, i: int, pod: Pod) -> World:
    return world._replace(pods=(*world.pods[:i], pod, *world.pods[i + 1 :]))
