"""A memory folder that is really full: a tmpfs of 1 MiB in a separate mount namespace."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("no_room.py")


def in_a_small_tmpfs(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    script = f'mount -t tmpfs -o size=1m none "{folder}" && exec "$@"'
    return subprocess.run(
        ["unshare", "-rUm", "sh", "-c", script, "sh", *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )


def test_where_a_copy_finds_no_room_the_step_goes_on_and_the_last_save_waits(
    tmp_path: Path,
) -> None:
    if in_a_small_tmpfs(tmp_path, "true").returncode != 0:
        pytest.skip("this machine lets nobody mount a tmpfs in a namespace of his own")
    found = in_a_small_tmpfs(tmp_path, sys.executable, str(SCRIPT), str(tmp_path))
    assert found.returncode == 0, found.stderr[-3000:]
    assert "steps went on" in found.stdout
