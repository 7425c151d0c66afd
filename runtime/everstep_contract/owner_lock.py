"""A lock in shared memory that wakes whoever waits for it when its owner ends.

The kernel releases a robust mutex when its owner begins to exit, before it frees the process's
memory. `waitpid` returns after that: 75 to 190 µs later for each MB (measured, on a busy machine),
so seconds later for a large process.

The owner is a thread. Its end does not prove that its process runs no more code, so whoever is
woken must check that separately (`everstep_agent.pod.exiting`).
"""

import ctypes
import errno
import mmap
import os

BYTES = 64
"""Room for a `pthread_mutex_t`: 40 on x86-64, 48 on arm64."""
_PROCESS_SHARED = _ROBUST = 1
_libc = ctypes.CDLL(None)


def create(page: mmap.mmap, offset: int) -> None:
    """Initialize the lock. Raises OSError if the system has no such lock."""
    attributes = (ctypes.c_char * BYTES)()
    _check(_libc.pthread_mutexattr_init(attributes))
    _check(_libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
    _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
    _check(_libc.pthread_mutex_init(_at(page, offset), attributes))


def own(page: mmap.mmap, offset: int) -> None:
    """Make the calling thread the owner until it ends; the page stays mapped. Raises OSError."""
    lock = _at(page, offset)
    _check(_libc.pthread_mutex_lock(lock))
    _owned.append(lock)


_owned: list[ctypes.Array[ctypes.c_char]] = []
"""Keeps the locks mapped, because the kernel finds a lock through its owner's memory."""


def wait_owner_ended(path: str, offset: int) -> bool:
    """Block until the owner has ended. False: nobody owns the lock.

    Raises:
        OSError: there is no such file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        # A mapping of its own: its caller may unmap the page while this thread waits in it.
        page = mmap.mmap(fd, mmap.PAGESIZE)
    finally:
        os.close(fd)
    lock = _at(page, offset)
    result = _libc.pthread_mutex_lock(lock)
    if result in (0, errno.EOWNERDEAD):
        _libc.pthread_mutex_unlock(lock)
    return bool(result == errno.EOWNERDEAD)


def _at(page: mmap.mmap, offset: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * BYTES).from_buffer(page, offset)


def _check(result: int) -> None:
    if result:
        raise OSError(result, os.strerror(result))
