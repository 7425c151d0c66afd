"""Proves that a signal has ended a worker, while the kernel still frees its memory.

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
_STOPS = frozenset({signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
PROOF_SECONDS = 1.0
"""Limit for the threads of a killed process to begin their exit. A process that the kernel keeps
for longer is waited for like any other process.
"""
LOOK_SECONDS = 0.0005
"""Pause between two looks at the threads' flags."""


def watch_killed(path: str, pid: int, tell: Callable[[int], None]) -> None:
    """Call `tell` on the running event loop, with the signal's number, once this child is proven to
    be ended by a signal.

    Does not call it if the child ends in another way, is reaped before there is a proof, or if no
    thread can be started (the container's limit of processes). Its end is known once it is reaped.

    Args:
        path: the page whose lock the child owns.
    """
    loop = asyncio.get_running_loop()

    def watch() -> None:
        if number := _wait_killed(path, pid):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell, number)

    thread = threading.Thread(target=watch, name=f"everstep-watch-{pid}", daemon=True)
    with contextlib.suppress(RuntimeError):  # can't start new thread
        thread.start()


def _wait_killed(path: str, pid: int) -> int:
    try:
        if not position.wait_owner_ended(path):
            return 0
    except OSError:
        return 0
    limit = time.monotonic() + PROOF_SECONDS
    while time.monotonic() < limit and os.path.exists(f"/proc/{pid}"):
        if number := find_killer(pid):
            return number
        time.sleep(LOOK_SECONDS)
    return 0


def find_killer(pid: int) -> int:
    """The signal that has ended this process: none of its threads runs user code any more. 0: it is
    not proven that a signal has.

    A process that dumps core counts only once it has done so.
    """
    try:
        # Once the process has such an exit code, none of its threads can start another one.
        number = _parse_signal(int(read_stat(f"/proc/{pid}")[_EXIT_CODE]))
        threads = os.listdir(f"/proc/{pid}/task") if number else []
    except (OSError, IndexError):
        return 0
    return number if all(_is_exiting(f"/proc/{pid}/task/{thread}") for thread in threads) else 0


def _parse_signal(code: int) -> int:
    """The fatal signal of an exit code; 0: none. The kernel shows a stopped process with the code of
    the signal that has stopped it.
    """
    number = code & 0x7F
    return 0 if code > 0xFF or number in _STOPS else number


def _is_exiting(folder: str) -> bool:
    try:
        return bool(int(read_stat(folder)[_FLAGS]) & PF_EXITING)
    except (FileNotFoundError, ProcessLookupError):
        return True
