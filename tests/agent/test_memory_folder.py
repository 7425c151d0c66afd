"""A run's memory folder is removed by its launcher, or by another launcher if that one has died."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from everstep_agent.local import memory_folder

HOLDER = """
import sys, pathlib
from everstep_agent.local import memory_folder
print(memory_folder.create(pathlib.Path(sys.argv[1])).path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another launcher; it prints the path of its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield process
    process.kill()
    process.wait()
    assert process.stdin
    assert process.stdout
    process.stdin.close()
    process.stdout.close()


def folder_of(holder: "subprocess.Popen[str]") -> Path:
    assert holder.stdout is not None
    return Path(holder.stdout.readline().strip())


def test_a_living_launchers_folder_stays_and_a_dead_ones_goes(
    tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    folder = folder_of(holder)
    (folder / "slot-0-0").mkdir()
    memory_folder.sweep(tmp_path)
    assert folder.exists()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert folder.exists()
    memory_folder.sweep(tmp_path)
    assert not folder.exists()


def test_a_run_is_trained_while_its_launcher_lives(tmp_path: Path) -> None:
    held = memory_folder.create(tmp_path)
    assert not memory_folder.is_trained("store/r", tmp_path)
    memory_folder.note_run(held, "store/r")
    memory_folder.sweep(tmp_path)
    assert memory_folder.is_trained("store/r", tmp_path)
    assert not memory_folder.is_trained("store/other", tmp_path)
    os.close(held.lock)
    memory_folder.sweep(tmp_path)
    assert not memory_folder.is_trained("store/r", tmp_path)


def test_a_run_is_the_same_whatever_path_leads_to_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("store")
    held = memory_folder.create(tmp_path)
    memory_folder.note_run(held, f"{tmp_path}/store/r")
    assert memory_folder.is_trained(f"{tmp_path}/link/r", tmp_path)
    assert not memory_folder.is_trained("s3://store/r", tmp_path)
    held.remove()


@pytest.mark.parametrize(
    ("shared", "other", "chosen"),
    [(4 << 30, 100 << 30, "shm"), (64 << 20, 100 << 30, "tmp"), (64 << 20, 10 << 20, "shm")],
)
def test_a_small_shm_as_in_a_container_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: int, other: int, chosen: str
) -> None:
    """Otherwise no save of a model of 20 MB finds room there, and the run waits for ever at its end."""
    folders = {tmp_path / "shm": shared, tmp_path / "tmp": other}
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(memory_folder, "measure_size", folders.__getitem__)
    assert memory_folder.find_parent(tmp_path / "shm") == tmp_path / chosen
    assert memory_folder.find_parent(tmp_path / "missing") == tmp_path / "tmp"


@pytest.mark.timeout(20)
def test_what_another_user_puts_there_holds_nobody_up(tmp_path: Path) -> None:
    foreign = tmp_path / f"{memory_folder.PREFIX}1-x"
    foreign.mkdir()
    os.mkfifo(foreign / memory_folder.NOTE)
    held = memory_folder.create(tmp_path)
    memory_folder.note_run(held, "store/r")
    assert memory_folder.is_trained("store/r", tmp_path)
    assert not memory_folder.is_trained("store/other", tmp_path)
    held.remove()


def test_the_lock_is_kept_by_the_launcher_and_not_by_what_it_starts(tmp_path: Path) -> None:
    held = memory_folder.create(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    os.close(held.lock)
    memory_folder.sweep(tmp_path)
    assert not held.path.exists()
    child.communicate(b"\n")


def test_a_folder_that_was_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = memory_folder.tempfile.mkdtemp, []

    def make_and_lose(**where: object) -> str:
        made.append(make(**where))
        if len(made) == 1:
            memory_folder.sweep(tmp_path)
        return made[-1]

    monkeypatch.setattr(memory_folder.tempfile, "mkdtemp", make_and_lose)
    held = memory_folder.create(tmp_path)
    assert [Path(p).exists() for p in made] == [False, True]
    assert held.path == Path(made[1])
    held.remove()
    assert not held.path.exists()


def test_what_is_no_folder_of_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "everstep-run-1-x").write_text("a file")
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / "everstep-run-2-x").symlink_to(target)
    memory_folder.sweep(tmp_path)
    assert target.exists()
    assert (tmp_path / "everstep-run-1-x").exists()
