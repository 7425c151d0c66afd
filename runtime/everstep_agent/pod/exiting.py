"""Proves that SIGKILL has ended a worker, while the kernel still frees its memory.

The worker owns a lock in its page. When the kernel releases it, a thread wakes up here. The flags
of the worker's threads then prove that none of them runs user code any more. The process can be
reaped only later: after 75 to 190 µs for each MB of its memory.
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
"""Indices of fields in `/proc/PID/stat`, counted from the state, which follows the name."""
PROOF_SECONDS = 1.0
"""Limit for the threads of a killed process to begin their exit. A process that the kernel keeps
for longer is waited for like any other process.
"""
LOOK_SECONDS = 0.0005
"""Pause between two looks at the threads' flags."""


def watch_killed(path: str, pid: int, tell: Callable[[], None]) -> None:
    """Call `tell` on the running event loop once this child is proven to be killed.

    Does not call it if the child ends in another way, or is reaped before there is a proof.

    Args:
        path: the page whose lock the child owns.
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
    """Whether SIGKILL has ended this process: none of its threads runs user code any more."""
    try:
        # Once the process has this exit code, none of its threads can start another one.
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
