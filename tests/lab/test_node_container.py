"""The shim with real processes: output, exit, signals, and that a container leaves nothing behind."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from everstep_lab import procs
from everstep_lab.node.container import Command, ContainerProcess, Ended, start_container
from everstep_lab.node.kubelet_port import Wanted, follow, read_lines

PYTHON = sys.executable
SPAWN_DAEMON = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "300"], start_new_session=True)
if (between := os.fork()) == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(300)
    os._exit(0)
os.waitpid(between, 0)
print("up", flush=True)
"""


async def start(folder: Path, *argv: str, env: Mapping[str, str] | None = None) -> ContainerProcess:
    command = Command(
        argv=argv, env={"PATH": "/usr/bin:/bin", **(env or {})}, cwd=str(folder), log=folder / "log"
    )
    return await start_container(command, folder / "spec.json", mark=str(folder))


async def run(folder: Path, *argv: str) -> Ended:
    process = await start(folder, *argv)
    await process.started()
    return await process.wait()


def log_of(folder: Path) -> bytes:
    return b"".join(read_lines((folder / "log").read_bytes(), Wanted()))


async def until_said(folder: Path, process: ContainerProcess, text: bytes) -> None:
    """Wait until the log contains `text`; the container must be running."""
    async with asyncio.timeout(20):
        async for chunk in follow(folder / "log", Wanted(follow=True), lambda: True):
            if text in chunk:
                return


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


async def test_output_and_exit_code_are_kept(tmp_path: Path) -> None:
    ended = await run(tmp_path, "sh", "-c", "echo out; echo err >&2; printf end; exit 7")
    assert ended.exit_code == 7
    assert set(log_of(tmp_path).splitlines()) == {b"out", b"err", b"end"}


async def test_a_command_that_is_not_there_fails_in_runcs_words(tmp_path: Path) -> None:
    ended = await run(tmp_path, "everstep")
    assert ended.exit_code == 128
    assert ended.failed_to_start == 'exec: "everstep": executable file not found in $PATH'


async def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    ended = await run(tmp_path, "/no/such")
    assert ended.failed_to_start == 'exec: "/no/such": stat /no/such: no such file or directory'


async def test_death_by_a_signal_is_128_plus_its_number(tmp_path: Path) -> None:
    ended = await run(tmp_path, "sh", "-c", "kill -SEGV $$")
    assert (ended.exit_code, ended.signal) == (139, signal.SIGSEGV)


async def test_sigterm_goes_to_the_main_process_alone(tmp_path: Path) -> None:
    script = "trap 'echo asked; exit 4' TERM; echo up; while :; do sleep 0.05; done"
    process = await start(tmp_path, "sh", "-c", script)
    assert await process.started()
    await until_said(tmp_path, process, b"up")
    process.terminate()
    assert (await process.wait()).exit_code == 4
    assert log_of(tmp_path).endswith(b"asked\n")


async def test_daemons_die_with_the_main_process(tmp_path: Path) -> None:
    process = await start(tmp_path, PYTHON, "-c", SPAWN_DAEMON + "time.sleep(300)")
    assert await process.started()
    await until_said(tmp_path, process, b"up")
    family = process.processes()
    assert len(family) >= 3
    os.kill(process.pid, signal.SIGKILL)
    assert (await process.wait()).exit_code == 137
    assert not [pid for pid in family if alive(pid)]


async def test_kill_ends_everything_however_it_was_started(tmp_path: Path) -> None:
    process = await start(tmp_path, PYTHON, "-c", SPAWN_DAEMON + "time.sleep(300)")
    assert await process.started()
    await until_said(tmp_path, process, b"up")
    family = [*process.processes(), process.shim]
    process.kill()
    await process.wait()
    assert not [pid for pid in family if alive(pid)]


async def test_a_shim_that_is_told_to_end_takes_the_container_with_it(tmp_path: Path) -> None:
    """If the lab is killed, the kernel sends this signal to the shim."""
    process = await start(tmp_path, PYTHON, "-c", SPAWN_DAEMON + "time.sleep(300)")
    assert await process.started()
    await until_said(tmp_path, process, b"up")
    family = process.processes()
    os.kill(process.shim, signal.SIGTERM)
    await process.wait()
    assert not [pid for pid in family if alive(pid)]


async def test_every_process_of_the_shim_carries_the_labs_mark(tmp_path: Path) -> None:
    process = await start(tmp_path, "sleep", "300", env={procs.MARK: str(tmp_path)})
    assert await process.started()
    assert {process.pid, process.shim} <= set(procs.marked(tmp_path))
    process.kill()
    await process.wait()


async def test_a_long_line_without_an_end_reaches_the_log(tmp_path: Path) -> None:
    ended = await run(tmp_path, PYTHON, "-c", "print('x' * 100_000, end='')")
    assert ended.exit_code == 0
    assert log_of(tmp_path).strip() == b"x" * 100_000


@pytest.mark.parametrize("size", [1, 300_000])
async def test_output_written_just_before_the_end_is_not_lost(tmp_path: Path, size: int) -> None:
    script = f"import os, sys; sys.stdout.write('y' * {size}); sys.stdout.flush(); os._exit(0)"
    await run(tmp_path, PYTHON, "-c", script)
    assert len(log_of(tmp_path).strip()) == size
