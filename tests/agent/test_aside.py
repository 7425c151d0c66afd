"""Work that no step waits for leaves the cores to the ranks."""

import os
import subprocess
import sys
import threading

import pytest

from everstep_agent import aside


async def test_its_threads_are_nicer_than_the_one_that_asks() -> None:
    def look() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert await aside.run(look) == max(look(), aside.NICENESS)
    assert look() == os.getpriority(os.PRIO_PROCESS, 0)


async def test_it_returns_and_raises_what_the_work_does() -> None:
    assert await aside.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await aside.run(divmod, 7, 0)


def test_a_process_that_is_nicer_already_saves_all_the_same() -> None:
    """An agent may not lower the niceness of its threads."""
    code = "import asyncio; from everstep_agent import aside; print(asyncio.run(aside.run(divmod, 7, 2)))"
    found = subprocess.run(
        ["unshare", "--user", "--map-root-user", "nice", "-n", "19", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "unshare" in found.stderr:
        pytest.skip("this machine lets nobody have a user namespace")
    assert found.stdout == "(3, 1)\n", found.stderr
