"""Chunks in a folder, one file per chunk: in memory, or on a disk of the node."""

import asyncio
import contextlib
import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from everstep_agent.checkpoint.files import (
    PART,
    NewFile,
    make_folder,
    read_file,
    replace_file,
)
from everstep_agent.checkpoint.keeping import (
    Note,
    Notes,
    Resumed,
    Save,
    add_saves,
    drop_before,
    list_kept,
    rewind,
)
from everstep_contract import codec
from everstep_contract.manifest import Chunk

NOTE = ".note"
LOCK = ".lock"
ANSWER_SECONDS = 15.0
"""Limit of an access to the folder, plus one second for each MiB, because a disk may hang."""
LARGEST_BYTES = 2**26
"""The limit of a read does not grow beyond that of so many bytes: the size of a manifest is not known
before it is read.
"""
DISK_THREADS = 4
Change = Callable[[Notes], dict[str, Note]]
R = TypeVar("R")


class FolderTier:
    """Each file is named by its chunk's digest, and exists completely or not at all. Each owner has
    a note that says which chunks it needs. Several agents of one node may share a folder on its
    disk.

    Args:
        run: notes of another run are ignored.
        sync: chunks and notes survive a power failure.
    """

    def __init__(self, folder: Path, name: str, *, run: str = "", sync: bool = False) -> None:
        self.folder, self.name = folder, name
        self._run, self._sync = run, sync
        self._threads = ThreadPoolExecutor(DISK_THREADS, "everstep-disk") if sync else None
        """Threads of its own, so that a disk that hangs takes no thread from anything else."""

    def locate(self, digest: str) -> Path | None:
        """The path of this chunk's file, which may not exist; None: no chunk can have that name."""
        return self.folder / digest if is_name(digest) else None

    async def get(self, chunk: Chunk) -> bytes | None:
        with contextlib.suppress(TimeoutError):
            size = min(chunk.bytes, LARGEST_BYTES)
            return await self.run(size, self.read, chunk.digest, 0, chunk.bytes)
        return None

    async def put(self, chunk: Chunk, body: bytes | bytearray) -> None:
        await self.run(chunk.bytes, self._put, chunk, body)

    async def list(self) -> Collection[str]:
        return await self.run(0, self.list_now)

    async def keep(self, owner: str, saves: Sequence[Save], since: int) -> None:
        if not is_name(owner):
            raise OSError(errno.EINVAL, f"{owner!r} is not the name of an owner")
        added = Note(run=self._run, owner=owner, saves=tuple(saves))
        await self.run(0, self._change, lambda notes: add_saves(notes, added, since))

    async def drop(self, owner: str) -> None:
        await self.run(0, self._drop, owner)

    async def rewind(self, resumed: Resumed) -> None:
        """Delete the saves that the run does not continue. Raises OSError."""
        await self.run(0, self._change, lambda notes: rewind(notes, resumed))

    async def run(self, size: int, work: Callable[..., R], *args: object) -> R:
        """Run `work` in a thread. Raises what `work` raises, and `TimeoutError`.

        Args:
            size: how many bytes it reads or writes.
        """
        limit = ANSWER_SECONDS + size / 2**20
        try:
            async with asyncio.timeout(limit):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, partial(work, *args))
        except TimeoutError:
            text = f"{self.folder} did not answer within {limit:.0f} s"
            raise TimeoutError(errno.ETIMEDOUT, text) from None

    def read(self, digest: str, start: int, count: int) -> bytes | None:
        """At most `count` bytes of a chunk, from `start` on; None: the chunk is not here."""
        path = self.locate(digest)
        return None if path is None else read_file(path, start, count)

    def list_now(self) -> set[str]:
        try:
            return {name for name in os.listdir(self.folder) if is_name(name)}
        except FileNotFoundError:
            return set()

    def remove(self, digest: str) -> None:
        (self.folder / digest).unlink(missing_ok=True)

    async def clear(self) -> None:
        with contextlib.suppress(OSError):
            await self.run(0, self._change, lambda notes: {})

    def forget_before(self, step: int) -> None:
        """Delete the saves of older steps. If that fails, a later call deletes them.

        Another thread frees their memory: that takes 0.1 s and more for each GiB, and an agent's event
        loop waits for this call.
        """
        with contextlib.suppress(OSError):
            if self.folder.is_dir():
                self._decide(lambda notes: drop_before(notes, step))
                if self._aside.is_dir():
                    threading.Thread(target=_empty, args=(self._aside,), daemon=True).start()

    def read_notes(self) -> dict[str, Note]:
        """The notes of this run, by owner."""
        found = {}
        for path in self.folder.glob(f"*{NOTE}"):
            with contextlib.suppress(OSError, codec.DecodeError):
                note = codec.loads(Note, path.read_bytes())
                if note.run == self._run and path.name == note.owner + NOTE:
                    found[note.owner] = note
        return found

    def receive(self, chunk: Chunk) -> NewFile:
        """As `MemoryTier.receive`."""
        if not is_name(chunk.digest):
            raise OSError(errno.EINVAL, f"{chunk.digest!r} is not the name of a chunk")
        return NewFile(self.folder / chunk.digest, sync=self._sync)

    def _put(self, chunk: Chunk, body: bytes | bytearray) -> None:
        with contextlib.closing(self.receive(chunk)) as new:
            new.file.write(body)
            new.publish()

    @property
    def _aside(self) -> Path:
        """The folder of the files that are about to be deleted."""
        return self.folder.with_name(f"{self.folder.name}.gone")

    def _drop(self, owner: str) -> None:
        self._change(lambda notes: {o: note for o, note in notes.items() if o != owner})
        if self._sync:  # a disk outlives the job, and would keep an empty folder of each run
            self._remove_empty()

    def _remove_empty(self) -> None:
        """Remove the folder if it holds nothing but the lock."""
        with contextlib.suppress(OSError), self._locked():
            if os.listdir(self.folder) == [LOCK]:
                (self.folder / LOCK).unlink()
                self.folder.rmdir()

    def _change(self, change: Change) -> None:
        """Change the notes, and free the room of what nobody needs any more."""
        self._decide(change)
        _empty(self._aside)  # also what a killed agent has left there

    def _decide(self, change: Change) -> None:
        """As `_change`, but only set aside what nobody needs. An agent's event loop may wait for the lock,
        so nothing that takes long is done while it is held.
        """
        with self._locked():
            before = self.read_notes()
            after = change(before)
            self._clear({f"{owner}{NOTE}" for owner in after} | list_kept(after) | {LOCK})
            changed = [note for owner, note in after.items() if before.get(owner) != note]
            try:
                self._write_notes(changed)
            except OSError:  # where there is no room, there may be some now
                _empty(self._aside)
                self._write_notes(changed)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process at a time decide what is deleted, so that it sees the others' notes. Creates the folder."""
        while True:
            make_folder(self.folder, sync=self._sync)
            try:
                descriptor = os.open(
                    self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
                )
            except FileNotFoundError:  # another process has just removed the folder
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if _has_name(descriptor):
                    yield
                    return
            finally:
                os.close(descriptor)

    def _write_notes(self, notes: Iterable[Note]) -> None:
        for note in notes:
            path = self.folder / f"{note.owner}{NOTE}"
            replace_file(path, codec.dumps(note), sync=self._sync)

    def _clear(self, kept: Collection[str]) -> None:
        """Set everything but `kept` aside. A worker that still maps a deleted file keeps its bytes until
        the worker ends.
        """
        for path in self.folder.iterdir():
            whole = path.name.partition(".")[0] if path.name.endswith(PART) else path.name
            if whole not in kept:
                self._set_aside(path)

    def _set_aside(self, path: Path) -> None:
        try:
            self._aside.mkdir(exist_ok=True)
            path.rename(self._aside / secrets.token_hex(8))
        except OSError:  # perhaps somebody has just removed that folder, or there is no room for it
            path.unlink(missing_ok=True)


def _has_name(descriptor: int) -> bool:
    """False: the file was removed, so a lock on it guards nothing."""
    return os.fstat(descriptor).st_nlink > 0


def _empty(folder: Path) -> None:
    """Delete all files in a folder, and the folder if nobody has added another one meanwhile."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()


def is_name(digest: str) -> bool:
    return digest.isascii() and digest.replace("-", "").isalnum()
