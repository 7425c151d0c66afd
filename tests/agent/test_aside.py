"""Work that no step waits for leaves the cores to the ranks."""

import os
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
