"""What the kernel reports about the CPU use of real processes."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from everstep_agent.pod.usage import read_usage

SPINS = "echo spins; while :; do :; done"
WAITS = "echo waits; exec sleep 60"


@contextmanager
def grandparent(of: str) -> Iterator[int]:
    """Start a process that waits, as its child does, for a grandchild that runs `of`."""
    script = f"sh -c '{of}' & wait"
    process = subprocess.Popen(
        ["sh", "-c", f'sh -c "{script}" & wait'],
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "the grandchild did not start"
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(("script", "helped"), [(SPINS, True), (WAITS, False)])
def test_a_process_is_helped_by_a_grandchild_that_runs(script: str, helped: bool) -> None:
    """The process itself only waits (state S) once it has started the others."""
    with grandparent(script) as pid:
        while True:
            usage = read_usage(pid, others=True)
            if usage is not None and (usage.helped, usage.state) == (helped, "S"):
                break
