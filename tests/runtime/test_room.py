"""A tier that is full, has no inodes, or is read-only costs saves but no step. Then the next save succeeds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("room_comes_and_goes.py")
LONG = pytest.mark.long
APART = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.mark.parametrize(
    ("tier", "trouble", "told"),
    [
        pytest.param("store", "full", "no space or no inodes left; make room", marks=LONG),
        pytest.param("store", "no-inodes", "no space or no inodes left; make room", marks=LONG),
        pytest.param(
            "store", "read-only", "the file system is read-only; mount it writable", marks=LONG
        ),
        pytest.param("disk", "full", "No space left on device", marks=LONG),
        pytest.param("disk", "no-inodes", "No space left on device", marks=LONG),
        pytest.param("disk", "read-only", "Read-only file system", marks=LONG),
        ("memory", "full", "No space left on device"),
        pytest.param("memory", "no-inodes", "No space left on device", marks=LONG),
    ],
)
def test_a_tier_without_room_costs_no_step_and_recovers_by_itself(
    tmp_path: Path, tier: str, trouble: str, told: str
) -> None:
    if subprocess.run([*APART, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets nobody mount a tmpfs in a namespace of his own")
    found = subprocess.run(
        [*APART, sys.executable, str(SCRIPT), tier, trouble, told, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(TESTS), "PACED_STEPS": "100000"},
    )
    assert found.returncode == 0, found.stderr[-6000:]
    assert "no step stopped" in found.stdout
