"""What the chunks in a tier near the trainer are kept for. Pure.

An owner is whoever needs chunks there: the slot whose part was copied, or a restore. It lists the
saves that it still needs; a chunk that no owner lists is deleted. A save is named by (epoch, step)
and its chunks by digest, not by rank or place, so an erasure code could later store other chunks
under the same list.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep_contract.manifest import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """The chunks of one save that an owner needs."""

    epoch: int
    step: int
    chunks: tuple[Chunk, ...]
    unsent: tuple[str, ...] = ()
    """Digests of those chunks that say how to finish the upload (`unsent.py`)."""

    @property
    def key(self) -> tuple[int, int]:
        return self.epoch, self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Everything that one owner needs. It is stored as a file next to the chunks, so that the
    agent's successor knows what they are for.
    """

    run: str
    owner: str
    saves: tuple[Save, ...]


Notes = Mapping[str, Note]
"""By owner."""


def add_saves(notes: Notes, added: Note, since: int) -> dict[str, Note]:
    """The notes after the saves of `added` are added for its owner. Saves older than step `since`
    are removed from all notes: this step is committed, so nobody needs them.
    """
    own = notes.get(added.owner, added)
    merged = replace(own, saves=merge_saves([*own.saves, *added.saves]))
    return drop_before({**notes, added.owner: merged}, since)


def drop_before(notes: Notes, step: int) -> dict[str, Note]:
    """The notes without saves of older steps."""
    return _select(notes, lambda save: save.step >= step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What the run continues from."""

    epoch: int | None
    """None: all epochs had the same state at this step."""
    step: int
    by: int | None = None
    """The epoch that continues, whose own saves are kept; None: it has none yet."""


def rewind(notes: Notes, resumed: Resumed) -> dict[str, Note]:
    """The notes without saves that the run does not continue."""
    return _select(notes, lambda save: continues(save, resumed))


def continues(save: Save, resumed: Resumed) -> bool:
    """Whether the run may still need `save`.

    It does not need saves of steps after `resumed`, or of the same step from another epoch, except
    those of epoch `resumed.by` or a newer one.
    """
    if resumed.by is not None and save.epoch >= resumed.by:
        return True
    return save.step < resumed.step or (
        save.step == resumed.step and resumed.epoch in (None, save.epoch)
    )


def _select(notes: Notes, is_needed: Callable[[Save], bool]) -> dict[str, Note]:
    kept = {
        owner: replace(note, saves=tuple(save for save in note.saves if is_needed(save)))
        for owner, note in notes.items()
    }
    return {owner: note for owner, note in kept.items() if note.saves}


def list_digests(saves: Iterable[Save]) -> set[str]:
    return {chunk.digest for save in saves for chunk in save.chunks}


def list_kept(notes: Notes) -> set[str]:
    return {digest for note in notes.values() for digest in list_digests(note.saves)}


def merge_saves(saves: Sequence[Save]) -> tuple[Save, ...]:
    """One for each (epoch, step), the oldest first."""
    found: dict[tuple[int, int], Save] = {}
    for save in sorted(saves, key=lambda s: (s.step, s.epoch)):
        found[save.key] = _merge(found.get(save.key), save)
    return tuple(found.values())


def _merge(one: Save | None, other: Save) -> Save:
    if one is None:
        return other
    chunks = {c.digest: c for c in (*one.chunks, *other.chunks)}
    unsent = dict.fromkeys((*one.unsent, *other.unsent))
    return replace(one, chunks=tuple(chunks.values()), unsent=tuple(unsent))
