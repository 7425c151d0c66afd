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
"""About a tenth of a core beside a rank that computes, so a save is never stuck."""
MOST_THREADS = 4


def _yield_cores() -> None:
    """Of this thread alone, as Linux has it. A process that is nicer already may not be less so."""
    thread = threading.get_native_id()
    own = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(own, NICENESS))


_threads = ThreadPoolExecutor(
    max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2)),
    thread_name_prefix="everstep-aside",
    initializer=_yield_cores,
)


async def run(work: Callable[P, R], *args: P.args, **more: P.kwargs) -> R:
    """As `asyncio.to_thread`, in one of these threads."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(work, *args, **more))
