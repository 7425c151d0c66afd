"""Threads for work that no step waits for, such as digests of a save. Where all cores are busy, ranks go first."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

NICENESS = 10
"""A thread still gets about a tenth of a core that a rank keeps busy, so a save always progresses.
"""
MOST_THREADS = 4


def _yield_cores() -> None:
    """Lower the priority of this thread; on Linux, niceness belongs to a thread. If the process has
    a higher niceness already, keep it: lowering it needs a privilege.
    """
    thread = threading.get_native_id()
    own = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(own, NICENESS))


def open_threads(name: str) -> ThreadPoolExecutor:
    """More threads like those of `run`, for work that may hang: it then keeps none of theirs."""
    most = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2))
    return ThreadPoolExecutor(most, thread_name_prefix=name, initializer=_yield_cores)


_threads = open_threads("everstep-aside")


async def run(work: Callable[P, R], *args: P.args, **more: P.kwargs) -> R:
    """Like `asyncio.to_thread`, but in one of these threads."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(work, *args, **more))
