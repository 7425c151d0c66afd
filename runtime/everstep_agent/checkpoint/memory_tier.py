"""Chunks in this pod's memory: those of the newest saves, where their staged files still lie, and those that were
fetched for the last restore, a file each.

A note beside each staged file says which chunks lie in it, so that an agent that comes back after SIGKILL or an OOM
kill of its container adopts what its predecessor held.
"""

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from everstep_agent.checkpoint.folder_tier import FolderTier, read_file, replace_file
from everstep_contract import codec
from everstep_contract.manifest import Chunk
from everstep_contract.places import Place

NOTE = ".held"
"""What the name of a note has more than that of its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A staged file whose chunks are in the store; its note in the same form."""

    step: int
    chunks: Mapping[str, Place]
    """Digest → where it lies in the file."""


class MemoryTier:
    """A staged file is held until a save of another step is staged: its room is needed then.

    Args:
        folder: in memory, for chunks that are fetched.
        staging: where the agent's predecessor may have left staged files.
    """

    name = "memory"

    def __init__(self, folder: Path, staging: Path | None = None) -> None:
        self.fetched = FolderTier(folder / "chunks", self.name)
        self._held = list_left(staging) if staging is not None else {}
        self._checked: dict[str, Place] = {}
        """What this agent has verified since it started."""

    def hold(self, step: int, path: str, chunks: Mapping[str, Place]) -> None:
        """Own the staged file at `path`. `chunks`: as in `Held`."""
        file, held = Path(path), Held(step=step, chunks=dict(chunks))
        self._held[file] = held
        with contextlib.suppress(OSError):  # without it a successor reads from the store
            replace_file(note_of(file), codec.dumps(held))

    def release_others(self, step: int) -> None:
        """Delete the staged files of other steps. A worker that has mapped one keeps its bytes."""
        for path in [p for p, held in self._held.items() if held.step != step]:
            del self._held[path]
            self._checked = {d: p for d, p in self._checked.items() if p.path != str(path)}
            for gone in (note_of(path), path):
                gone.unlink(missing_ok=True)

    def find(self, digest: str) -> Place | None:
        """Where a chunk lies that was verified when it came here. Whoever reads it checks it again."""
        staged = (held.chunks[digest] for held in self._held.values() if digest in held.chunks)
        return self._checked.get(digest) or next(staged, None)

    def note(self, chunk: Chunk, sums: Mapping[str, int]) -> Place:
        """This chunk was verified here. `sums`: as in `Place`."""
        file = Place(path=str(self.fetched.folder / chunk.digest), start=0, bytes=chunk.bytes)
        place = replace(self.find(chunk.digest) or file, sums=dict(sums))
        self._checked[chunk.digest] = place
        return place

    def distrust(self, digest: str) -> None:
        """What lies here of this chunk is damaged."""
        self._held = {p: _without(held, digest) for p, held in self._held.items()}
        self._checked.pop(digest, None)
        self.fetched.drop(digest)

    async def get(self, chunk: Chunk) -> bytes | None:
        place = self.find(chunk.digest)
        if place is None:
            return await self.fetched.get(chunk)
        return read_file(Path(place.path), place.start, place.bytes)

    async def put(self, chunk: Chunk, body: bytes) -> None:
        """Raises OSError if there is no room."""
        await self.fetched.put(chunk, body)

    async def keep(self, digests: Collection[str]) -> None:
        """Delete all other fetched chunks. Raises OSError if the folder cannot be made."""
        self._checked = {d: place for d, place in self._checked.items() if d in digests}
        await self.fetched.keep(digests)

    def read(self, digest: str, start: int, count: int) -> bytes | None:
        """Bytes of the chunk with this digest, from `start` on, `count` at most; None: it is not here."""
        place = self.find(digest)
        if place is None:
            return self.fetched.read(digest, start, count)
        return read_file(
            Path(place.path), place.start + start, max(0, min(count, place.bytes - start))
        )


def list_left(staging: Path) -> dict[Path, Held]:
    """The staged files with a note. What the note says is believed no further than a checksum confirms it."""
    found = {}
    for note in sorted(staging.glob(f"*{NOTE}")):
        file = note.with_name(note.name.removesuffix(NOTE))
        with contextlib.suppress(OSError, codec.DecodeError):
            held = codec.loads(Held, note.read_bytes())
            if file.is_file():
                chunks = {d: replace(p, path=str(file)) for d, p in held.chunks.items()}
                found[file] = replace(held, chunks=chunks)
    return found


def note_of(file: Path) -> Path:
    """The path of a staged file's note."""
    return file.with_name(file.name + NOTE)


def _without(held: Held, digest: str) -> Held:
    return replace(held, chunks={d: p for d, p in held.chunks.items() if d != digest})
