"""Everstep distinguishes a rank that the kernel's OOM killer ended from one that somebody else killed."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.gang import Gang
from everstep_agent.pod import deaths
from everstep_agent.pod.out_of_memory import (
    RECENT_SECONDS,
    MemoryGroup,
    OutOfMemory,
    find_group,
)

UNLIMITED = "9223372036854771712"
"""The limit that cgroup v1 shows if none is set."""


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def fake(folder: Path, limit: str = "1073741824") -> MemoryGroup:
    """A memory cgroup of which the kernel has ended no process yet."""
    write(folder, {"memory.events": "low 0\noom 0\noom_kill 0\n", "memory.max": limit + "\n"})
    return MemoryGroup(events=folder / "memory.events", limit=folder / "memory.max")


def count(group: MemoryGroup, kills: int) -> None:
    group.events.write_text(f"low 0\noom 7\noom_kill {kills}\n")


@pytest.mark.parametrize(
    ("own", "there", "found"),
    [
        pytest.param("0::/", "memory.events", "memory.events", id="v2, a container"),
        pytest.param("0::/a/b", "a/b/memory.events", "a/b/memory.events", id="v2, a machine"),
        pytest.param(
            "9:cpu,memory:/pods/x\n0::/", "memory/memory.oom_control", "memory/memory.oom_control",
            id="v1, a container",
        ),
        pytest.param(
            "4:memory:/a\n0::/", "memory/a/memory.oom_control", "memory/a/memory.oom_control",
            id="v1, a machine",
        ),
        pytest.param("0::/", "memory/x", None, id="neither"),
    ],
)  # fmt: skip
def test_the_group_is_found(tmp_path: Path, own: str, there: str, found: str | None) -> None:
    mounts = write(tmp_path / "mounts", {there: ""})
    given = write(tmp_path, {"cgroup": own + "\n"}) / "cgroup"
    group = find_group(mounts, given)
    assert (group and group.events) == (found and mounts / found)


def test_without_a_group_nothing_is_said(tmp_path: Path) -> None:
    assert find_group(tmp_path, tmp_path / "absent") is None
    assert OutOfMemory(None).explain(0.0) == ""


def test_only_a_recent_end_explains_a_death(tmp_path: Path) -> None:
    group = fake(tmp_path)
    memory = OutOfMemory(group)
    assert memory.explain(1.0) == ""
    count(group, 1)
    memory.look(2.0)
    assert "out of memory" in memory.explain(2.0 + RECENT_SECONDS)
    assert memory.explain(2.1 + RECENT_SECONDS) == ""
    count(group, 2)
    assert "out of memory" in memory.explain(100.0)


def test_what_was_counted_before_is_not_news(tmp_path: Path) -> None:
    group = fake(tmp_path)
    count(group, 3)
    assert OutOfMemory(group).explain(0.0) == ""


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("1073741824", "resources.limits.memory of the container, which is 1.0 GiB"),
        ("536870912", "which is 512 MiB"),
        ("max", "so its node, or a cgroup above it, has none left"),
        (UNLIMITED, "so its node, or a cgroup above it, has none left"),
    ],
)
def test_the_limit_is_named(tmp_path: Path, limit: str, said: str) -> None:
    group = fake(tmp_path, limit)
    memory = OutOfMemory(group)
    count(group, 1)
    assert said in memory.explain(0.0)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup of 64 MiB for a process of this test."""
    own = find_group()
    if own is None or not os.access(own.events.parent, os.W_OK):
        pytest.skip("this machine lets the test make no cgroup")
    folder = own.events.parent / f"everstep-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / own.limit.name).write_text(str(64 * 2**20))
    except OSError as error:
        pytest.skip(f"this machine lets the test make no cgroup with a limit: {error}")
    yield folder
    folder.rmdir()


ENDED_BY_THE_KERNEL = """
import os, subprocess, sys
from everstep_agent.pod.out_of_memory import OutOfMemory, find_group
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
memory = OutOfMemory(find_group())
eat = "open('/proc/self/oom_score_adj', 'w').write('1000'); held = bytearray(2**30)"
others = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
for now, script in enumerate((others, eat)):
    print(subprocess.run([sys.executable, "-c", script]).returncode, memory.explain(now), sep="; ")
"""


def test_the_kernels_own_end_is_recognized(small_group: Path) -> None:
    """SIGKILL ends two processes; the OOM killer sends it to the second one."""
    told = subprocess.run(
        [sys.executable, "-c", ENDED_BY_THE_KERNEL, str(small_group)],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert told[0] == f"{-signal.SIGKILL}; "
    assert told[1].startswith(f"{-signal.SIGKILL}; out of memory: raise resources.limits.memory")
    assert "64 MiB" in told[1]


async def test_the_incident_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = fake(tmp_path / "group")
    monkeypatch.setattr(deaths, "find_group", lambda: group)
    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 3)
        count(group, 1)
        os.kill(gang.worker(1), signal.SIGKILL)
        await gang.reports()
        incident = gang.seen.incidents[-1]
        assert incident.cause == "WorkerDied"
        assert "killed by signal 9 (SIGKILL), out of memory: raise resources" in incident.message
        assert "1.0 GiB" in incident.message
        shutil.rmtree(group.events.parent)
