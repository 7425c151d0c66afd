"""The memory of one step's gradients is kept for the next."""

import subprocess
import sys

import pytest

from everstep import heap

COUNT = """
import resource
import torch
from everstep import heap
torch.set_num_threads(1)
heap.keep_freed_memory({})
def step():
    blocks = [torch.ones(2**18) for _ in range(32)]  # 32 MiB
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""


def count_faults(environ: dict[str, str], program: str = COUNT) -> int:
    run = [sys.executable, "-c", program]
    return int(subprocess.run(run, env=environ, capture_output=True, check=True, text=True).stdout)


def test_a_step_takes_the_memory_that_the_last_one_has_freed() -> None:
    plain = count_faults({}, COUNT.replace("heap.keep_freed_memory({})", ""))
    if plain < 1000:
        pytest.skip(f"this allocator keeps it by itself: {plain} page faults in ten steps")
    assert count_faults({}) < plain / 100


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "1"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1"),
        ("LD_PRELOAD", "libjemalloc.so"),
    ],
)
def test_what_the_user_has_tuned_stays(name: str, value: str) -> None:
    assert not heap.keep_freed_memory({name: value})


def test_tunables_of_other_parts_of_glibc_do_not_matter() -> None:
    assert heap.keep_freed_memory(
        {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=1048576"}
    )
