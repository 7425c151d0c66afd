"""What the user's code finds in its environment."""

import glob
import os
import platform
import subprocess

import pytest

from everstep_agent.cores import share_cores
from everstep_agent.pod import worker_environ

OURS = "glibc.cpu.x86_non_temporal_threshold=1048576"
THREADS = {"OMP_NUM_THREADS": str(share_cores(1))}


def build(environ: dict[str, str], workers: int = 1) -> dict[str, str]:
    return worker_environ.build(environ, workers)


def test_everything_but_the_token() -> None:
    found = build({"EVERSTEP_TOKEN": "secret", "EVERSTEP_RUN": "r", "HOME": "/h"})
    assert found == {"EVERSTEP_RUN": "r", "HOME": "/h", **THREADS, "GLIBC_TUNABLES": OURS}


def test_the_users_tunables_stay() -> None:
    malloc = "glibc.malloc.trim_threshold=1"
    assert build({"GLIBC_TUNABLES": malloc})["GLIBC_TUNABLES"] == f"{malloc}:{OURS}"
    own = "glibc.cpu.x86_non_temporal_threshold=8388608"
    assert build({"GLIBC_TUNABLES": own}) == {"GLIBC_TUNABLES": own, **THREADS}


def test_the_workers_share_the_cores_unless_the_user_has_chosen() -> None:
    cores = len(os.sched_getaffinity(0))
    assert build({}, workers=2 * cores)["OMP_NUM_THREADS"] == "1"
    assert build({"OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "5"


def test_glibc_takes_the_value() -> None:
    """glibc ignores what it does not know, so a wrong name or value would go unnoticed."""
    loaders = glob.glob("/lib64/ld-linux-x86-64.so.2")
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc" or not loaders:
        pytest.skip("not glibc on x86-64")
    command, environ = [loaders[0], "--list-tunables"], build(dict(os.environ))
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if ran.returncode:
        pytest.skip("this glibc does not list its tunables")
    assert "x86_non_temporal_threshold: 0x100000 " in ran.stdout
