"""How much a process uses the cores, as the kernel reports it."""

import os
from collections.abc import Iterator

from everstep_agent.pod.proc_stat import read_stat, read_text
from everstep_agent.pod.progress import Usage

NANOSECONDS = 1e-9


def read_usage(pid: int, *, others: bool) -> Usage | None:
    """The main thread's use of the cores; None: the process is gone, or the kernel does not report
    it.

    Args:
        others: whether to look at its other threads and its descendants, too.
    """
    try:
        main = f"/proc/{pid}/task/{pid}"
        on_core, queued, _ = read_text(f"{main}/schedstat").split()
        return Usage(
            state=read_stat(main)[0],
            on_core=int(on_core) * NANOSECONDS,
            queued=int(queued) * NANOSECONDS,
            helped=others and any(state == "R" for state in _list_others(pid)),
        )
    except (OSError, ValueError, IndexError):
        return None


def _list_others(pid: int) -> Iterator[str]:
    """The states of the process's other threads, and of all its descendants, because data workers
    are children of a child.
    """
    for thread in os.listdir(f"/proc/{pid}/task"):
        folder = f"/proc/{pid}/task/{thread}"
        if int(thread) != pid:
            yield read_stat(folder)[0]
        with open(f"{folder}/children") as file:
            children = file.read().split()
        for child in children:
            yield read_stat(f"/proc/{child}")[0]
            yield from _list_others(int(child))
