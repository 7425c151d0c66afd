"""The death of a worker by SIGKILL, proven while the kernel still frees its memory.

The lock that the worker owns on its page wakes a thread here; the flags of its threads prove that none of them
runs user code any more. A process that is killed can be reaped only later: after 75 to 190 µs for each
MB of its memory.
"""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from everstep_agent.pod.proc_stat import read_stat
from everstep_contract import position

PF_EXITING = 0x4
_FLAGS, _EXIT_CODE = 6, 49
"""Fields of `/proc/PID/stat`, counted from the state, which follows the name."""
PROOF_SECONDS = 1.0
"""Limit for the threads of a killed process to begin their exit; one that the kernel does not let go is
waited for like any other process.
"""
LOOK_SECONDS = 0.0005
"""Between two looks at their flags."""


def watch_killed(path: str, pid: int, tell: Callable[[], None]) -> None:
    """Calls `tell` on the running event loop once this child is killed, if that is known before it can be reaped.

    Args:
        path: of the page whose lock the child owns.
    """
    loop = asyncio.get_running_loop()

    def watch() -> None:
        if _wait_killed(path, pid):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell)

    threading.Thread(target=watch, name=f"everstep-watch-{pid}", daemon=True).start()


def _wait_killed(path: str, pid: int) -> bool:
    try:
        if not position.wait_owner_ended(path):
            return False
    except OSError:
        return False
    limit = time.monotonic() + PROOF_SECONDS
    while time.monotonic() < limit and os.path.exists(f"/proc/{pid}"):
        if is_killed(pid):
            return True
        time.sleep(LOOK_SECONDS)
    return False


def is_killed(pid: int) -> bool:
    """Whether this process has got SIGKILL, and none of its threads runs user code any more."""
    try:
        # Once this is its exit code, no thread of it can start another one.
        if int(read_stat(f"/proc/{pid}")[_EXIT_CODE]) != signal.SIGKILL:
            return False
        threads = os.listdir(f"/proc/{pid}/task")
    except (OSError, IndexError):
        return False
    return all(_is_exiting(f"/proc/{pid}/task/{thread}") for thread in threads)


def _is_exiting(folder: str) -> bool:
    try:
        return bool(int(read_stat(folder)[_FLAGS]) & PF_EXITING)
    except (FileNotFoundError, ProcessLookupError):
        return True
