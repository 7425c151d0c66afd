"""Writes to a folder with the semantics of an object store: an object exists completely or not at
all, and a confirmed write survives a power failure.

A body is written to the run's staging folder and fsynced there. Then it gets its key by a link
(create) or a rename (put), and every folder from the key up to the run is fsynced. This is done for
all folders each time. A writer cannot know that a folder it finds was fsynced, because another
writer may have created it a moment ago. A killed writer leaves a file only in the staging folder,
where there are no keys.
"""

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from everstep_agent.storage.errors import Unsupported
from everstep_agent.storage.store import Sink

STAGING = ".staging"
STALE_SECONDS = 3600.0
"""Age at which a staging file has no writer any more: writes are given up after two minutes."""
PIECE_BYTES = 1 << 20
_TRIES = 100
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)
"""What file systems without hard links answer; EXDEV: they have none between two folders."""


def staging_key() -> str:
    return f"{STAGING}/{secrets.token_hex(16)}"


def is_staging(key: str) -> bool:
    return key.startswith(f"{STAGING}/")


def publish(root: Path, staged: str, key: str, *, replace: bool) -> bool:
    """Give the object at `staged` its key. Returns False if the key exists and `replace` is false.

    Raises:
        Unsupported: the file system has no hard links, and `replace` is false.
        OSError: `FileNotFoundError` if the staging file was removed in the meantime.
    """
    source, target = root / staged, root / key
    try:
        _sync(source)
        done = _give_key(source, target, replace)
    finally:
        source.unlink(missing_ok=True)
    # Also if the key exists: an earlier try of the same write may have created it and failed after that.
    for folder in target.parents:
        _sync_folder(folder)
        if folder == root:
            break
    return done


def measure(path: Path) -> int:
    """Bytes of the object. Raises `FileNotFoundError` if there is none."""
    try:
        found = path.stat()
    except NotADirectoryError:
        raise FileNotFoundError(path) from None
    if not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(path)
    return found.st_size


def stream_file(path: Path, sink: Sink) -> int:
    """Feed the file to `sink`; returns its size in bytes.

    Reads with one small buffer, because memory for a whole chunk costs more CPU time (to get it and
    to give it back) than the digest.
    """
    size, buffer = 0, bytearray(PIECE_BYTES)
    with path.open("rb", buffering=0) as file, memoryview(buffer) as view:
        while count := file.readinto(view):
            sink.update(view[:count])
            size += count
    return size


def make(base: Path, folder: Path) -> None:
    """Create `folder`, which is below `base`, and all folders in between. When it returns, their
    entries are on disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for parent in folder.parents:
        if parent == base.parent:
            break
        _sync(parent)
    with contextlib.suppress(PermissionError):  # others' folders may be hidden, as on a shared disk
        _sync(base.parent)


def describe_obstacle(folder: Path) -> str:
    """What stands in the place of this folder, or of one above it; empty: nothing does."""
    for place in (folder, *folder.parents):
        if os.path.islink(place) and not os.path.exists(place):
            target = os.readlink(place)
            return f"{place} is a link to {target}, which does not exist (is its volume mounted?)"
        if os.path.exists(place):
            return "" if os.path.isdir(place) else f"{place} is a file, not a folder"
    return ""


def sweep(root: Path) -> None:
    """Delete files of killed writers. Their ages are measured by the folder's own clock, which may
    be that of another host. It is read without a new file, for which a full disk has no room.
    """
    staging = root / STAGING
    if not staging.is_dir():
        return
    os.utime(staging)
    now = staging.stat().st_mtime
    for path in staging.iterdir():
        try:
            if now - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
        except FileNotFoundError:  # its writer, or another sweep, was faster
            continue


def _give_key(source: Path, target: Path, replace: bool) -> bool:
    for _ in range(_TRIES):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if replace:
                source.replace(target)
                return True
            return _link(source, target)
        except FileNotFoundError:
            # A concurrent delete has emptied the folder and removed it.
            if not source.exists():
                raise
    raise FileNotFoundError(f"{target.parent} was removed {_TRIES} times while it was written to")


def _link(source: Path, target: Path) -> bool:
    try:
        target.hardlink_to(source)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise Unsupported(
            f"cannot create {target}: the file system of this folder has no hard links"
            f" ({os.strerror(error.errno)}); use a volume that has them, or an object store"
        ) from None
    return True


def _sync_folder(folder: Path) -> None:
    try:
        _sync(folder)
    except (
        FileNotFoundError
    ):  # the object was deleted in the meantime, and its empty folder with it
        return


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
