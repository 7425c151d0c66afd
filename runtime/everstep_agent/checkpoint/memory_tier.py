"""Chunks in this pod's memory: those of the newest saves, where their staged files still lie, and those that were
fetched for the last restore, a file each.

A note beside each staged file says which chunks lie in it, so that an agent that comes back after SIGKILL or an OOM
kill of its container adopts what its predecessor held.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep_agent.checkpoint import digest
from everstep_contract.manifest import Chunk

NOTE = ".held"
"""What the name of a note has more than that of its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Bytes `start .. end` of a file."""

    path: Path
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A staged file whose chunks are in the store."""

    step: int
    path: Path
    spans: Mapping[str, tuple[int, int]]
    """Digest → first byte, and the byte after the last."""

    @property
    def note(self) -> Path:
        return self.path.with_name(self.path.name + NOTE)

    def find(self, name: str) -> Region | None:
        if name not in self.spans:
            return None
        start, end = self.spans[name]
        return Region(path=self.path, start=start, end=end)


class MemoryTier:
    """A staged file is held until a save of another step is staged: its room is needed then.

    Args:
        folder: in memory, for chunks that are fetched.
        staging: where the agent's predecessor may have left staged files.
    """

    name = "memory"

    def __init__(self, folder: Path, staging: Path | None = None) -> None:
        self.chunks = folder / "chunks"
        """Each file is named by its digest."""
        self._held = list_left(staging) if staging is not None else []

    def hold(self, step: int, path: str, spans: Mapping[str, tuple[int, int]]) -> None:
        """Own the staged file at `path`. `spans`: as in `Held`."""
        held = Held(step=step, path=Path(path), spans=dict(spans))
        self._held.append(held)
        with contextlib.suppress(OSError):  # without it a successor reads from the store
            replace_file(held.note, json.dumps({"step": step, "spans": held.spans}).encode())

    def release_others(self, step: int) -> None:
        """Delete the staged files of other steps. A worker that has mapped one keeps its bytes."""
        for held in [h for h in self._held if h.step != step]:
            self._held.remove(held)
            for path in (held.note, held.path):
                path.unlink(missing_ok=True)

    def locate(self, digests: Iterable[str]) -> dict[str, Region]:
        """Those of the chunks that lie in staged files."""
        found = {d: self._find(d) for d in digests}
        return {d: region for d, region in found.items() if region is not None}

    async def holds(self, chunk: Chunk) -> bool:
        """Whether it is here, and right."""
        return await asyncio.to_thread(self._is_right, chunk)

    async def get(self, chunk: Chunk) -> bytes | None:
        return await asyncio.to_thread(self.read, chunk.digest, 0, chunk.bytes)

    async def put(self, chunk: Chunk, body: bytes) -> None:
        """Raises OSError if there is no room."""
        await asyncio.to_thread(replace_file, self.chunks / chunk.digest, body)

    async def keep(self, digests: Collection[str]) -> None:
        """Delete all other files of chunks. Raises OSError if the folder cannot be made."""
        await asyncio.to_thread(_clear, self.chunks, set(digests))

    def read(self, name: str, start: int, count: int) -> bytes | None:
        """Bytes of the chunk with this digest, from `start` on, `count` at most; None: it is not here."""
        region = self._find(name)
        if region is None and not _is_name(name):
            return None
        path, first = (region.path, region.start) if region else (self.chunks / name, 0)
        if region is not None:
            count = max(0, min(count, region.end - first - start))
        try:
            with path.open("rb") as file:
                return os.pread(file.fileno(), count, first + start)
        except OSError:
            return None

    def _find(self, name: str) -> Region | None:
        return next((r for h in reversed(self._held) if (r := h.find(name))), None)

    def _is_right(self, chunk: Chunk) -> bool:
        if self._find(chunk.digest) is not None:
            body = self.read(chunk.digest, 0, chunk.bytes)
            return body is not None and not digest.find_difference(body, chunk.digest)
        path = self.chunks / chunk.digest
        if not path.is_file() or path.stat().st_size != chunk.bytes:
            return False
        return digest.matches_file(path, chunk.digest)


def list_left(staging: Path) -> list[Held]:
    """The staged files with a note. What the note says is believed no further than a digest confirms it."""
    found = []
    for note in sorted(staging.glob(f"*{NOTE}")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            told = json.loads(note.read_bytes())
            spans = {str(d): (int(a), int(b)) for d, (a, b) in told["spans"].items()}
            held = Held(
                step=int(told["step"]),
                path=note.with_name(note.name.removesuffix(NOTE)),
                spans=spans,
            )
            if held.path.is_file():
                found.append(held)
    return found


def _is_name(name: str) -> bool:
    """Whether it can be that of a chunk's file: peers choose it."""
    return name.isascii() and name.replace("-", "").isalnum()


def replace_file(path: Path, body: bytes) -> None:
    """The file is there completely or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(body)
    os.replace(part, path)


def _clear(folder: Path, kept: Collection[str]) -> None:
    """Frees memory at once: a worker that still maps a removed file keeps it until it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink(missing_ok=True)
