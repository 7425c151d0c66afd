"""A run's folder in memory, which exists as long as its launcher.

The launcher holds a lock on it. A folder that is not locked belongs to a launcher that was killed,
and the next run removes it. Process ids would not work: two containers that share /dev/shm cannot
see each other's.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

PREFIX = "everstep-run-"
NOTE = "run"
"""A file in the folder that names the run."""
NOTE_BYTES = 8192
"""The most that is read of it."""
SMALLEST_BYTES = 1 << 30
"""A smaller /dev/shm is not used, if the temporary folder is larger; pods have as much by default."""
TRIES = 10
"""How often to try: another launcher's sweep may remove a folder before it is locked."""


@dataclass(frozen=True, slots=True)
class MemoryFolder:
    path: Path
    lock: int
    """A descriptor of the folder; the kernel releases the lock however the process ends."""

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def create(parent: Path | None = None) -> MemoryFolder:
    """Raises OSError if no folder can be created."""
    for _ in range(TRIES):
        name = f"{PREFIX}{os.getpid()}-"
        path = Path(tempfile.mkdtemp(prefix=name, dir=parent or find_parent()))
        lock = lock_folder(path)
        if lock is not None:
            return MemoryFolder(path, lock)
    raise OSError(
        f"{parent or find_parent()}: another process removes the folders that are created here"
    )


def sweep(parent: Path | None = None) -> None:
    """Remove the folders of launchers that were killed."""
    for path in (parent or find_parent()).glob(f"{PREFIX}*-*"):
        lock = lock_folder(path)
        if lock is not None:
            MemoryFolder(path, lock).remove()


def note_run(folder: MemoryFolder, place: str) -> None:
    """Let other launchers know which run this one trains."""
    with contextlib.suppress(OSError):  # no room: the other one takes the run over without a word
        (folder.path / NOTE).write_bytes(_encode(place))


def is_trained(place: str, parent: Path | None = None) -> bool:
    """Whether a launcher on this machine trains that run. Call `sweep` before, which removes the
    folders of others.
    """
    found = []
    for path in (parent or find_parent()).glob(f"{PREFIX}*-*/{NOTE}"):
        with contextlib.suppress(OSError):  # another user's, or removed in between
            found.append(_read_note(path))
    return _encode(place) in found


def _encode(place: str) -> bytes:
    """Two paths of one folder are one run."""
    return os.fsencode(place if "://" in place else os.path.realpath(place))


def _read_note(path: Path) -> bytes:
    """Raises OSError. Where all users may create files, this one may be a pipe that nobody writes to."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.read(file, NOTE_BYTES)
    finally:
        os.close(file)


def lock_folder(path: Path) -> int | None:
    """Lock the folder. None: another process holds the lock, or the folder no longer exists."""
    try:
        found = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(found), os.stat(path)):
            return found
    except OSError:  # locked, or removed in between
        pass
    os.close(found)
    return None


def find_parent(shared: Path = Path("/dev/shm")) -> Path:
    """The temporary folder replaces a /dev/shm that is too small: containers have one of 64 MiB by default."""
    other = Path(tempfile.gettempdir())
    if not os.access(shared, os.W_OK):
        return other
    size = measure_size(shared)
    return shared if size >= SMALLEST_BYTES or size >= measure_size(other) else other


def measure_size(folder: Path) -> int:
    """Bytes of its file system, free or not, so that all launchers of one machine choose the same folder."""
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize
