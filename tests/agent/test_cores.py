"""How many cores the ranks of a pod share: the container's CPU limit counts, too."""

import os
from pathlib import Path

import pytest

from everstep_agent.cores import share_cores


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def share(folder: Path, own: str, files: dict[str, str], workers: int = 1) -> int:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    (folder / "own").write_text(own + "\n")
    return share_cores(workers, folder, folder / "own")


@pytest.mark.parametrize(
    ("limit", "workers", "cores"),
    [
        ("800000 100000", 1, 8), ("800000 100000", 8, 1), ("800000 100000", 3, 2), ("50000 100000", 1, 1),
        ("max 100000", 8, 8), ("12800000 100000", 1, 64), ("unknown", 1, 64), ("800000 0", 1, 64),
    ],
)  # fmt: skip
def test_a_limit_of_cgroup_v2(tmp_path: Path, limit: str, workers: int, cores: int) -> None:
    assert share(tmp_path, "0::/", {"cpu.max": limit}, workers) == cores


@pytest.mark.parametrize(("quota", "cores"), [("400000", 4), ("-1", 64)])
def test_a_limit_of_cgroup_v1(tmp_path: Path, quota: str, cores: int) -> None:
    files = {"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.cfs_period_us": "100000"}
    assert share(tmp_path, "4:cpu,cpuacct:/kubepods/pod1\n0::/", files) == cores


def test_where_the_kernel_shows_no_limit_the_affinity_mask_counts(tmp_path: Path) -> None:
    assert share(tmp_path, "0::/", {}, workers=4) == 16
    assert share_cores(1, tmp_path, tmp_path / "absent") == 64
