"""A memory folder that is really full: a tmpfs of 1 MiB in a separate mount namespace."""

from pathlib import Path

from runtime import no_room
from runtime.apart import call_apart


def test_where_a_copy_finds_no_room_the_step_goes_on_and_the_last_save_waits(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    assert "steps went on" in call_apart(lambda: no_room.main(folder), tmp_path / "output")
