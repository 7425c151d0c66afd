"""Files that exist completely or not at all."""

import contextlib
import os
import secrets
import threading
from collections.abc import Iterable
from pathlib import Path

PART = ".part"


def read_file(path: Path, start: int, count: int) -> bytes | None:
    """At most `count` bytes of the file, from `start` on; None: it cannot be read."""
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), count, start)
    except OSError:
        return None


def replace_file(path: Path, body: bytes, *, sync: bool = False) -> None:
    """Write `body` to `path`. `sync`: it survives a power failure.

    Raises OSError; then the former file is unchanged.
    """
    with contextlib.closing(NewFile(path, sync=sync)) as new:
        new.file.write(body)
        new.publish()


class NewFile:
    """A file that is written under another name, and becomes `path` once it is complete. `sync`:
    it then survives a power failure. All methods raise OSError.
    """

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        self._path, self._sync = path, sync
        # A random name: agents of several pods may write the same file, and each is process 1.
        self._part = path.with_name(f"{path.name}.{secrets.token_hex(6)}{PART}")
        self.file = self._part.open("wb")

    def publish(self) -> None:
        self.file.flush()
        if self._sync:
            os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self._part, self._path)
        if self._sync:
            sync_folder(self._path.parent)

    def close(self) -> None:
        """Remove the file if it has not been published."""
        with contextlib.suppress(OSError):  # what could not be written is lost anyway
            self.file.close()
        self._part.unlink(missing_ok=True)


def delete_beside(paths: Iterable[Path]) -> threading.Thread | None:
    """Delete the names of these files now, and free their memory in another thread, which is returned:
    that takes the kernel a tenth of a second and more for each GiB.
    """
    held = [descriptor for path in paths if (descriptor := _delete_name(path)) is not None]
    if not held:
        return None
    thread = threading.Thread(target=_close_all, args=(held,), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the container's limit of processes: then here
        _close_all(held)
        return None
    return thread


def _delete_name(path: Path) -> int | None:
    """A descriptor that keeps the file, whose name is deleted; None: nothing is left to close."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    return descriptor


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def make_folder(path: Path, *, sync: bool = False) -> None:
    """Create a folder with its parents. Raises OSError."""
    missing = [p for p in path.parents if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    # Also if the folder exists: its creator may have been killed before its name was on disk.
    for made in (path, *missing) if sync else ():
        sync_folder(made.parent)


def sync_folder(path: Path) -> None:
    """Make the names in this folder survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
