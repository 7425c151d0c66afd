"""A full, exhausted or read-only tier costs saves, never a step, and the next save after it succeeds."""

import asyncio
from pathlib import Path

import pytest

from runtime import room_comes_and_goes
from runtime.apart import call_apart

LONG = pytest.mark.long


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
    folder = tmp_path / "job"
    folder.mkdir()
    said = call_apart(
        lambda: asyncio.run(room_comes_and_goes.main(tier, trouble, told, folder)),
        tmp_path / "output",
    )
    assert "no step stopped" in said
