"""Chunks in a folder, a file each: in memory, or on a disk of the node."""

import asyncio
import os
from collections.abc import Collection
from pathlib import Path

from everstep_contract.manifest import Chunk


class FolderTier:
    """Each file is named by its chunk's digest, and is there completely or not at all."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def locate(self, digest: str) -> Path | None:
        """The file of this chunk, whether it is there or not; None: no chunk can have that name."""
        named = digest.isascii() and digest.replace("-", "").isalnum()
        return self.folder / digest if named else None

    async def get(self, chunk: Chunk) -> bytes | None:
        return await asyncio.to_thread(self.read, chunk.digest, 0, chunk.bytes)

    async def put(self, chunk: Chunk, body: bytes) -> None:
        """Raises OSError if there is no room."""
        await asyncio.to_thread(replace_file, self.folder / chunk.digest, body)

    async def keep(self, digests: Collection[str]) -> None:
        """Delete all other files. Raises OSError if the folder cannot be made."""
        await asyncio.to_thread(_clear, self.folder, frozenset(digests))

    def read(self, digest: str, start: int, count: int) -> bytes | None:
        """Bytes of a chunk, from `start` on, `count` at most; None: it is not here."""
        path = self.locate(digest)
        return None if path is None else read_file(path, start, count)

    def drop(self, digest: str) -> None:
        (self.folder / digest).unlink(missing_ok=True)


def read_file(path: Path, start: int, count: int) -> bytes | None:
    """None: the file cannot be read."""
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), count, start)
    except OSError:
        return None


def replace_file(path: Path, body: bytes) -> None:
    """The file is there completely or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(body)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _clear(folder: Path, kept: Collection[str]) -> None:
    """Frees memory at once: a worker that still maps a removed file keeps it until it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink(missing_ok=True)
