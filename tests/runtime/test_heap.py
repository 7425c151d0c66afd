"""The memory of one step's gradients is kept for the next."""

import subprocess
import sys

import pytest

from everstep import heap

COUNT = """
import os
import resource
import torch
from everstep import heap
torch.set_num_threads(1)
def step():
    blocks = [torch.ones(2**18) for _ in range(32)]  # 32 MiB
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def count():
    for _ in range(3):
        step()
    before = faults()
    for _ in range(10):
        step()
    print(faults() - before, flush=True)
if os.fork() == 0:  # as malloc is by itself
    count()
    os._exit(0)
os.wait()
heap.keep_freed_memory({})
count()
"""


def test_a_step_takes_the_memory_that_the_last_one_has_freed() -> None:
    run = [sys.executable, "-c", COUNT]
    shown = subprocess.run(run, env={}, capture_output=True, check=True, text=True).stdout
    plain, kept = map(int, shown.split())
    if plain < 1000:
        pytest.skip(f"this allocator keeps it by itself: {plain} page faults in ten steps")
    assert kept < plain / 100


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_what_the_user_has_tuned_stays(name: str) -> None:
    assert not heap.keep_freed_memory({name: "1"})
