"""Files that exist completely or not at all."""

import itertools
import os
from pathlib import Path

PART = ".part"
_numbers = itertools.count()


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
    part = path.with_name(f"{path.name}.{os.getpid()}-{next(_numbers)}{PART}")
    try:
        with part.open("wb") as file:
            file.write(body)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


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
