"""Saves that have parts but no commit yet. Pure.

A save ends in one of three ways: it is committed, overtaken by a newer one, or given up; the last
two are logged. Given-up saves are remembered for the ranks that wait for that very step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from everstep_agent.checkpoint.commit_rules import find_whole
from everstep_agent.checkpoint.parts import Part, PartKey
from everstep_contract.layout import name_ranks
from everstep_contract.units import Mesh

LACKING = 4
"""How many saves that lack a part keep their other parts: the missing part may still arrive."""
FAILED = 64
"""Limit on remembered saves that lack a part. If one were forgotten, a part that arrives later would
look like the first of a new save, and no further save would be due until that one was complete.
"""
GIVEN_UP = 16
"""Limit on remembered saves that were given up."""
Key = tuple[int, int]
"""(epoch, step)"""


@dataclass(frozen=True, slots=True)
class _GivenUp:
    reason: str
    parts: tuple[Part, ...]


class PendingSaves:
    def __init__(self) -> None:
        self._parts: dict[Key, dict[PartKey, Part]] = {}
        self._given_up: dict[Key, _GivenUp] = {}
        self._unsaved: set[Key] = set()
        """(epoch, rank) of full-state saves that were given up."""

    def add(self, part: Part) -> str:
        """Add a part. Returns the message to log, if any.

        A part of a save that was given up is sent again if its agent did not get the answer. It
        begins no new save: its other parts would not follow.
        """
        gone = self._given_up.get(part.key[:2])
        if gone is not None and part in gone.parts:
            return ""
        held = self._parts.setdefault((part.epoch, part.step), {})
        known = held.get(part.key)
        if part.problem and known and not known.problem:
            return ""  # another agent could not upload its copy of a part that is here
        held[part.key] = part
        if not self._why_lacking(part.key[:2]):
            return ""
        self._forget_lacking()
        if not part.problem or (known and known.problem):
            return ""
        return f"no checkpoint of step {part.step}: rank {part.rank}: {part.problem}"

    def _forget_lacking(self) -> None:
        """Forget the parts of older saves that cannot complete, but not why they cannot."""
        lacking = sorted(k for k in self._parts if self._why_lacking(k))
        for key in lacking[:-LACKING]:
            self._parts[key] = {k: p for k, p in self._parts[key].items() if p.problem}
        for key in lacking[:-FAILED]:
            del self._parts[key]

    def _why_lacking(self, key: Key) -> str:
        """Why the save cannot complete: a part failed, and no unit saves the full state."""
        parts = self._of(key).values()
        problem = next((f"rank {p.rank}: {p.problem}" for p in parts if p.problem), "")
        return "" if any(p.whole for p in parts) else problem

    def pending(self, epoch: int) -> list[int]:
        """Steps of this epoch whose parts have arrived or may arrive, and that are not committed."""
        return sorted(k[1] for k in self._parts if k[0] == epoch and not self._why_lacking(k))

    def parts(self, epoch: int, step: int) -> list[Part]:
        """The parts that can be committed."""
        return [p for p in self._of((epoch, step)).values() if not p.problem]

    def _of(self, key: Key) -> Mapping[PartKey, Part]:
        return self._parts.get(key, {})

    def has_whole(self, epoch: int, step: int, mesh: Mesh) -> bool:
        """Whether the parts of a whole unit have arrived."""
        return bool(find_whole(self.parts(epoch, step), mesh))

    def unsaved(self, epoch: int) -> frozenset[int]:
        """Ranks whose full-state save failed for good."""
        return frozenset(rank for e, rank in self._unsaved if e == epoch)

    def why_given_up(self, epoch: int, step: int) -> str:
        """Why no commit of this step will follow unless it is saved again; empty if one may."""
        key = epoch, step
        if key in self._parts and not self._why_lacking(key):
            return ""
        gone = self._given_up.get(key)
        return gone.reason if gone is not None else self._why_lacking(key)

    def give_up(self, key: Key, reason: str) -> None:
        parts = self._parts.pop(key, {})
        self._unsaved |= {(p.epoch, p.rank) for p in parts.values() if p.whole}
        self._given_up[key] = _GivenUp(reason, tuple(parts.values()))
        for old in list(self._given_up)[:-GIVEN_UP]:
            del self._given_up[old]

    def settle(self, key: Key) -> list[str]:
        """The save is committed: drop all older ones. Returns the messages about those that it
        overtook.
        """
        self._parts.pop(key, None)
        overtaken = [k for k in self.pending(key[0]) if k < key[1]]
        notes = [self._describe_overtaken((key[0], step), key[1]) for step in overtaken]
        self.drop_older(*key)
        return notes

    def _describe_overtaken(self, key: Key, newer: int) -> str:
        ranks = sorted({part.rank for part in self._parts[key].values()})
        return (
            f"no checkpoint of step {key[1]}: step {newer} was complete sooner; of the "
            f"older one only {name_ranks(ranks)} had arrived"
        )

    def drop_older(self, epoch: int, step: int) -> None:
        """Drops saves at or below a committed step, and those of older epochs."""
        self._parts = {k: v for k, v in self._parts.items() if k[0] >= epoch and k[1] > step}
