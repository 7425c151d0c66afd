"""Chunks in this pod's memory. The chunks of its own saves stay in the staged files. Chunks that
were fetched for the last restore, and copies of other pods' saves, are files of their own.

A note next to each staged file lists the chunks in it. So an agent that is restarted after SIGKILL
or an OOM kill of its container can adopt what its predecessor held.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from everstep_agent.checkpoint import keeping
from everstep_agent.checkpoint.files import (
    NewFile,
    delete_beside,
    read_file,
    replace_file,
)
from everstep_agent.checkpoint.folder_tier import FolderTier
from everstep_agent.checkpoint.keeping import Resumed, Save
from everstep_agent.checkpoint.unsent import unsent_of
from everstep_agent.waiting import Change
from everstep_contract import codec
from everstep_contract.log import Commit
from everstep_contract.manifest import Chunk
from everstep_contract.places import Place

MANIFEST = "manifest"
"""Owner of the manifest of the newest checkpoint, in the coordinator's pod."""
NOTE = ".held"
"""A note's name is the name of its file, followed by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A staged file and the chunks in it. The file's note has the same form."""

    epoch: int
    step: int
    chunks: Mapping[str, Place]
    """Digest → where the chunk is in the file."""
    unsent: str = ""
    """Digest of the chunk that is the file's `.unsent`; empty: there is none."""

    def to_save(self) -> Save:
        chunks = (Chunk(digest=d, key="", bytes=p.bytes) for d, p in self.chunks.items())
        unsent = (self.unsent,) if self.unsent else ()
        return Save(epoch=self.epoch, step=self.step, chunks=tuple(chunks), unsent=unsent)


class MemoryTier:
    """
    Args:
        folder: a folder in memory for chunks that come from elsewhere.
        staging: the folder where the agent's predecessor may have left staged files.
    """

    name = "memory"

    def __init__(self, folder: Path, staging: Path | None = None) -> None:
        self.others = FolderTier(folder / "chunks", self.name)
        self._held = list_left(staging) if staging is not None else {}
        self._checked: dict[str, Place] = {}
        """The chunks that this agent has verified since it started."""
        self._manifest = next(iter(_find_saves(self.others, MANIFEST)), None)
        self.committed = 0
        """Step of the newest checkpoint, as far as this pod knows."""
        self.kept = 0
        """As `EpochLevel.kept`."""
        self.changed = Change()
        """Fires when `list_saves` may have changed."""
        self._freeing: list[threading.Thread] = []
        """They free the memory of released files."""

    @property
    def since(self) -> int:
        """Nobody needs saves older than this step."""
        return max(self.committed, self.kept)

    # --- this pod's own saves --------------------------------------------------------------------

    def hold(self, held: Held, path: str) -> None:
        """Take over the staged file at `path`."""
        file = Path(path)
        self._held[file] = held
        with contextlib.suppress(OSError):  # without a note, a successor reads from elsewhere
            replace_file(note_of(file), codec.dumps(held))
        self.changed.fire()

    async def hold_manifest(self, commit: Commit, raw: bytes) -> None:
        """Keep the manifest of a checkpoint that this pod's coordinator has committed.

        Raises OSError.
        """
        chunk = Chunk(digest=commit.digest, key=commit.manifest, bytes=len(raw))
        save = Save(epoch=commit.epoch, step=commit.step, chunks=(chunk,))
        await self.keep(MANIFEST, [save], commit.step)
        await self.put(chunk, raw)
        self._manifest = save
        self.changed.fire()

    def list_saves(self) -> tuple[Save, ...]:
        """The oldest first. A manifest belongs to the save that it describes, or stands alone."""
        own = [held.to_save() for held in self._held.values()]
        return keeping.merge_saves([*own, *([self._manifest] if self._manifest else [])])

    def list_paths(self) -> set[str]:
        """The paths of the staged files."""
        return {str(path) for path in self._held}

    def list_digests(self, path: str) -> set[str] | None:
        """The digests of the chunks in this staged file; None: the file is not held."""
        held = self._held.get(Path(path))
        return None if held is None else set(held.chunks) - {held.unsent}

    def release(self, path: str) -> None:
        """Delete this staged file; `freed` waits for its memory. A worker that has mapped it keeps its
        bytes.
        """
        file = Path(path)
        self._held.pop(file, None)
        self._checked = {d: p for d, p in self._checked.items() if p.path != path}
        # The file first: a thread that writes its record looks afterwards whether the file is there.
        freeing = delete_beside((file, note_of(file), unsent_of(file)))
        self._freeing = [t for t in (*self._freeing, freeing) if t is not None and t.is_alive()]
        self.changed.fire()

    async def freed(self) -> None:
        """Wait until the memory of the released files is free."""
        for thread in self._freeing:
            await asyncio.to_thread(thread.join)

    def release_before(self, step: int, but: Collection[str] = ()) -> bool:
        """Delete the staged files of older steps, except these. Returns whether there were any."""
        old = [str(p) for p, held in self._held.items() if held.step < step and str(p) not in but]
        for path in old:
            self.release(path)
        return bool(old)

    def release_after(self, step: int) -> None:
        """Delete the staged files of later steps."""
        for path in [str(path) for path, held in self._held.items() if held.step > step]:
            self.release(path)

    def release_oldest(self, but: Collection[str] = ()) -> bool:
        """As `release_before`, but only for the oldest step."""
        steps = [held.step for path, held in self._held.items() if str(path) not in but]
        return bool(steps) and self.release_before(min(steps) + 1, but)

    async def drop_others(self) -> bool:
        """Delete everything but this pod's own saves. Returns whether there was something."""
        held = bool(self.others.list_now())
        self._manifest = None
        self._checked = {}
        await self.others.clear()
        self._forget()
        self.changed.fire()
        return held

    # --- any chunk -------------------------------------------------------------------------------

    def find(self, digest: str) -> Place | None:
        """Where a chunk is that was verified when it came here; None: it is not here. Its reader
        checks it again.
        """
        staged = (held.chunks[digest] for held in self._held.values() if digest in held.chunks)
        return self._checked.get(digest) or next(staged, None)

    def note(self, chunk: Chunk, sums: Mapping[str, int]) -> Place:
        """Note that this chunk was verified here, and return its place. `sums`: as in `Place`."""
        file = Place(path=str(self.others.folder / chunk.digest), start=0, bytes=chunk.bytes)
        place = replace(self.find(chunk.digest) or file, sums=dict(sums))
        self._checked[chunk.digest] = place
        return place

    def receive(self, chunk: Chunk) -> NewFile:
        """Return a file for this chunk, which is held once the file is published. Raises OSError."""
        return self.others.receive(chunk)

    def distrust(self, digest: str) -> None:
        """Forget this chunk, because it is damaged here."""
        self._held = {p: _without(held, digest) for p, held in self._held.items()}
        self._checked.pop(digest, None)
        self.others.remove(digest)

    async def get(self, chunk: Chunk) -> bytes | None:
        place = self.find(chunk.digest)
        if place is None:
            return await self.others.get(chunk)
        body = await asyncio.to_thread(read_file, Path(place.path), place.start, place.bytes)
        # Its file may have been released meanwhile. Then the worker stages its next save in the same memory.
        now = self.find(chunk.digest)
        return body if now is not None and now.path == place.path else None

    async def put(self, chunk: Chunk, body: bytes | bytearray) -> None:
        await self.others.put(chunk, body)

    async def list(self) -> Collection[str]:
        return self._list_now()

    async def keep(self, owner: str, saves: Sequence[Save], since: int) -> None:
        await self.others.keep(owner, saves, since)
        self._forget()

    async def drop(self, owner: str) -> None:
        await self.others.drop(owner)
        self._forget()

    def note_commit(self, step: int, but: Collection[str] = ()) -> None:
        """Delete what belongs to older steps, except these staged files."""
        self.committed = max(self.committed, step)
        self.release_before(step, but)
        self.others.forget_before(step)
        self._forget()
        self.changed.fire()

    async def rewind(self, resumed: Resumed) -> None:
        """Delete the saves that the run does not continue. Raises OSError."""
        for path, held in list(self._held.items()):
            if not keeping.continues(held.to_save(), resumed):
                self.release(str(path))
        if self._manifest and not keeping.continues(self._manifest, resumed):
            self._manifest = None
        await self.others.rewind(resumed)
        self._forget()

    def read(self, digest: str, start: int, count: int) -> bytes | None:
        """At most `count` bytes of a chunk, from `start` on; None: the chunk is not here."""
        place = self.find(digest)
        if place is None:
            return self.others.read(digest, start, count)
        return read_file(
            Path(place.path), place.start + start, max(0, min(count, place.bytes - start))
        )

    def _list_now(self) -> set[str]:
        staged = {digest for held in self._held.values() for digest in held.chunks}
        return self.others.list_now() | staged

    def _forget(self) -> None:
        """Forget the verified chunks that are no longer here."""
        others, folder = self.others.list_now(), str(self.others.folder)
        staged = {place.path for held in self._held.values() for place in held.chunks.values()}
        self._checked = {
            d: place
            for d, place in self._checked.items()
            if (d in others if os.path.dirname(place.path) == folder else place.path in staged)
        }


def _find_saves(tier: FolderTier, owner: str) -> tuple[Save, ...]:
    note = tier.read_notes().get(owner)
    return note.saves if note else ()


def list_left(staging: Path) -> dict[Path, Held]:
    """The staged files that have a note. A note is trusted only where a checksum confirms it."""
    found = {}
    for note in sorted(staging.glob(f"*{NOTE}")):
        file = note.with_name(note.name.removesuffix(NOTE))
        with contextlib.suppress(OSError, codec.DecodeError):
            held = codec.loads(Held, note.read_bytes())
            if file.is_file():
                found[file] = _at(held, file)
    return found


def _at(held: Held, file: Path) -> Held:
    paths = {held.unsent: str(unsent_of(file))}
    chunks = {d: replace(p, path=paths.get(d, str(file))) for d, p in held.chunks.items()}
    return replace(held, chunks=chunks)


def note_of(file: Path) -> Path:
    """The path of a staged file's note."""
    return file.with_name(file.name + NOTE)


def _without(held: Held, digest: str) -> Held:
    return replace(held, chunks={d: p for d, p in held.chunks.items() if d != digest})
