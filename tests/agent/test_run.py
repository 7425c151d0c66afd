"""`everstep run` as a user runs it: the command, its output, its exit status."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from everstep_agent import cli
from everstep_agent.local import launcher, memory_folder
from everstep_agent.pod import spawn

STUB = str(Path(__file__).with_name("stub_worker.py"))


class Command:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.text = ""

    async def line(self, pattern: str) -> re.Match[str]:
        """Return the first matching line, past or to come. Lines of different agents arrive in any
        order.
        """
        assert self.process.stdout is not None
        if found := re.search(pattern, self.text):
            return found
        async with asyncio.timeout(90):
            while raw := await self.process.stdout.readline():
                self.text += raw.decode()
                if found := re.search(pattern, raw.decode()):
                    return found
        raise AssertionError(f"no line {pattern!r} in:\n{self.text}")

    async def end(self) -> int:
        assert self.process.stdout is not None
        async with asyncio.timeout(90):
            self.text += (await self.process.stdout.read()).decode()
            return await self.process.wait()


@pytest.fixture
async def everstep(tmp_path: Path):
    started: list[Command] = []

    async def start(*arguments: str, **environ: str) -> Command:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "everstep_agent.cli", *arguments,
            cwd=tmp_path,
            env={**os.environ, "STUB_UNTIL": "20", **environ},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        started.append(Command(process))
        return started[-1]

    yield start
    for command in started:
        if command.process.returncode is None:
            command.process.kill()
            await command.process.wait()


def memory_of(run: Command) -> Path:
    (found,) = memory_folder.find_parent().glob(f"everstep-run-{run.process.pid}-*")
    return found


def pid_of_agent(worker: int) -> int:
    text = Path(f"/proc/{worker}/stat").read_text()
    return int(text.rpartition(")")[2].split()[1])


async def test_a_script_trains_to_its_end_and_the_run_verifies(everstep):
    command = await everstep("run", "--workers", "2", STUB)
    assert await command.end() == 0
    assert "done: trained to step 20" in command.text
    verify = await everstep("verify", "everstep-store/stub_worker")
    assert await verify.end() == 0
    assert "steps 1 to 20 once each" in verify.text
    again = await everstep("run", "--workers", "2", STUB)
    assert await again.end() == 0
    assert "done: trained to step 20; there was nothing left to do" in again.text


async def test_an_agent_and_its_workers_that_are_killed_are_replaced(everstep):
    command = await everstep("run", "--workers", "2", STUB, STUB_STEP_MS="100")
    pid = int((await command.line(r"rank 1 runs as pid (\d+)"))[1])
    await command.line(r"epoch 1: starts")
    os.kill(pid_of_agent(pid), signal.SIGKILL)
    await command.line(r"agent of slot \d lost: killed by signal 9")
    await command.line(r"epoch [2-9]: (resumes from|starts at) step")
    assert await command.end() == 0
    assert "steps lost: 0" in command.text
    assert await (await everstep("verify", "everstep-store/stub_worker")).end() == 0


async def test_a_second_ctrl_c_ends_the_run_and_is_no_loss(everstep):
    command = await everstep("run", "--workers", "2", STUB, STUB_STEP_MS="1000")
    await command.line(r"epoch 1: starts")
    command.process.send_signal(signal.SIGINT)
    await command.line(r"press Ctrl-C again to stop at once")
    await asyncio.sleep(launcher.TWICE_SECONDS)
    command.process.send_signal(signal.SIGINT)
    assert await command.end() == 130
    assert "stopping at once, without a save" in command.text
    assert "lost" not in command.text


STARTS_ANOTHER = """
import runpy, subprocess, sys

other = subprocess.Popen(["sleep", "300"])
print(f"started {other.pid}", flush=True)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


async def test_a_second_ctrl_c_ends_what_a_script_has_started(everstep, tmp_path: Path):
    script = tmp_path / "starts.py"
    script.write_text(STARTS_ANOTHER)
    command = await everstep("run", "--workers", "1", str(script), "--", STUB, STUB_STEP_MS="1000")
    pid = int((await command.line(r"started (\d+)"))[1])
    await command.line(r"epoch 1: starts")
    command.process.send_signal(signal.SIGINT)
    await command.line(r"press Ctrl-C again to stop at once")
    await asyncio.sleep(launcher.TWICE_SECONDS)
    command.process.send_signal(signal.SIGINT)
    assert await command.end() == 130
    async with asyncio.timeout(10):
        await spawn.wait_ended(pid)


async def test_a_script_that_starts_the_training_script_is_told_what_to_give(everstep, tmp_path):
    """As scripts for torchrun do."""
    script = tmp_path / "launch.py"
    script.write_text("import subprocess, sys\nsubprocess.call([sys.executable, *sys.argv[1:]])\n")
    command = await everstep("run", "--workers", "1", str(script), "--", STUB)
    assert await command.end() == 1
    assert "give everstep run the script that trains" in command.text.lower()


async def test_ctrl_c_saves_and_the_same_command_goes_on(everstep):
    command = await everstep("run", "--workers", "2", STUB, STUB_STEP_MS="100")
    await command.line(r"rank 1 runs as pid")
    await command.line(r"epoch 1: starts")
    command.process.send_signal(signal.SIGINT)
    assert await command.end() == 130
    step = int(re.search(r"the checkpoint of step (\d+) is committed; resume", command.text)[1])
    again = await everstep("run", "--workers", "3", STUB)
    await again.line(rf"found the checkpoint of step {step}|resumes from step {step}")
    assert await again.end() == 0


async def test_a_closed_terminal_saves_also_if_its_shell_sends_the_signal_again(everstep):
    command = await everstep("run", "--workers", "1", STUB, STUB_STEP_MS="100", STUB_UNTIL="1000")
    await command.line(r"epoch 1: starts")
    command.process.send_signal(signal.SIGHUP)
    await command.line(r"stopping: saving first")
    await asyncio.sleep(launcher.TWICE_SECONDS)
    command.process.send_signal(signal.SIGHUP)
    assert await command.end() == 130
    assert re.search(r"the checkpoint of step \d+ is committed; resume", command.text)


async def test_a_script_that_raises_ends_with_its_traceback_and_no_second_try(everstep):
    command = await everstep("run", "--workers", "2", STUB, STUB_MODE="raise")
    assert await command.end() == 1
    assert (
        "ScriptError: the script exited with status 1: ValueError: no such data set" in command.text
    )
    assert "Traceback" in command.text


async def test_a_script_that_raises_when_a_run_is_resumed_gets_no_second_try_either(
    everstep, tmp_path: Path
):
    first = await everstep("run", "--workers", "1", "--run", "r", STUB, STUB_UNTIL="5")
    assert await first.end() == 0
    script, flag = tmp_path / "edited.py", tmp_path / "flag"
    script.write_text(
        f"import os, time\nwhile not os.path.exists({str(flag)!r}):\n    time.sleep(0.01)\nimport no_such_module\n"
    )
    again = await everstep("run", "--workers", "1", "--run", "r", "--verbose", str(script))
    await again.line(r"event=round_waits")  # by now the agent knows the checkpoint
    flag.touch()
    assert await again.end() == 1
    assert "ScriptError: the script exited with status 1: ModuleNotFoundError" in again.text
    assert again.text.count("event=worker_spawned") == 1


async def test_a_script_that_is_not_there_is_named(everstep):
    command = await everstep("run", "nowhere.py")
    assert await command.end() == 2
    assert "there is no script 'nowhere.py'" in command.text


async def test_a_store_that_cannot_be_made_is_named(everstep, tmp_path: Path):
    command = await everstep("run", "--store", "/proc/no/store", STUB)
    assert await command.end() == 2
    assert "/proc/no" in command.text
    (tmp_path / "link").symlink_to("/no/volume")
    command = await everstep("run", "--store", f"{tmp_path}/link", STUB)
    assert await command.end() == 2
    assert f"{tmp_path}/link is a link to /no/volume, which does not exist" in command.text


async def test_an_argument_of_the_script_in_the_wrong_place_is_told_where_it_belongs(everstep):
    command = await everstep("run", STUB, "--lr", "0.1")
    assert await command.end() == 2
    assert "unrecognized arguments: --lr 0.1" in command.text
    assert f"{STUB} -- --lr 0.1" in command.text


async def test_arguments_reach_the_script(everstep, tmp_path: Path):
    (tmp_path / "say.py").write_text("import sys\nprint('ARGS', sys.argv[1:], flush=True)\n")
    command = await everstep("run", "say.py", "--", "--lr", "0.1")
    assert await command.end() == 1
    assert "ARGS ['--lr', '0.1']" in command.text
    assert "everstep.run(main)" in command.text


async def test_names_of_scripts_and_folders_may_have_any_bytes(everstep, tmp_path: Path):
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    (folder / "train.py").symlink_to(STUB)
    for command in (
        ["run", "--store", f"{folder}/s", f"{folder}/train.py"],
        ["verify", f"{folder}/s/train"],
    ):
        started = await everstep(*command)
        assert await started.end() == 0, started.text


async def test_workers_are_forked_and_a_preload_that_cannot_be_imported_is_said(everstep):
    command = await everstep("run", "--preload", "absent,json", STUB)
    assert await command.end() == 0
    assert "cannot import absent" in command.text
    assert "zygote forks no worker" not in command.text


async def test_without_the_zygote_a_worker_is_an_interpreter_of_its_own(everstep):
    command = await everstep("run", "--no-zygote", "--verbose", STUB)
    assert await command.end() == 0
    assert "event=worker_ready" in command.text
    assert "event=zygote" not in command.text


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            ("--workers", "3", "--mesh", "shard=2"),
            "--workers 3 is not a whole number of units of 2 (shard=2): use 2 or 4",
        ),
        (
            ("--workers", "4", "--mesh", "shard=2,tensor=2", "--spares", "1"),
            "--spares 1 is not a whole number of units of 4 (shard=2,tensor=2): use 4",
        ),
        (("--mesh", "pipeline=2"), "argument --mesh: pipeline: not yet"),
        (("--mesh", "2x2"), "'2x2' is no dimension; write shard=2"),
    ],
)
def test_units_that_cannot_be_are_told_with_the_fix(
    given: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.run(["run", *given, STUB])
    except SystemExit as end:
        status = int(end.code or 0)
    assert (status, problem in capsys.readouterr().err) == (2, True)


async def test_a_unit_that_survives_a_kill_saves_the_run(everstep, tmp_path: Path):
    """Rank 1 dies while the others wait for it in step 6. Both ranks of unit 1 have applied step 5."""
    kills = tmp_path / "kills"
    kills.mkdir()
    once = f"killed:6:{kills}:1"
    command = await everstep("run", "--workers", "4", "--mesh", "shard=2", STUB, STUB_MODE=once)
    await command.line(r"stub_worker: 4 workers in 2 units of 2 \(shard=2\), checkpoints in")
    assert await command.end() == 0
    assert re.search(r"recovered in .*steps lost: 0", command.text)
    verify = await everstep("verify", "everstep-store/stub_worker")
    assert await verify.end() == 0
    assert "steps 1 to 20 once each" in verify.text


@pytest.mark.parametrize("names", ["", "a b", "folder/model.py", "numpy,"])
async def test_a_preload_that_is_no_module_is_told_what_is_expected(everstep, names: str):
    command = await everstep("run", "--preload", names, STUB)
    assert await command.end() == 2
    assert "names of modules, separated by commas: numpy,my_package.model" in command.text


async def test_an_agent_that_is_told_to_end_saves_first_and_is_replaced(everstep):
    command = await everstep("run", "--workers", "2", STUB, STUB_STEP_MS="100")
    pid = int((await command.line(r"rank 1 runs as pid (\d+)"))[1])
    await command.line(r"epoch 1: starts")
    os.kill(pid_of_agent(pid), signal.SIGTERM)
    await command.line(r"epoch [2-9]: resumes from step")
    assert await command.end() == 0
    assert re.search(r"leave: slot \d leaves: its agent received SIGTERM", command.text)
    assert re.search(
        r"agent of slot \d: left; the checkpoint of step \d+ is committed", command.text
    )


@pytest.mark.parametrize(
    "told", ["the survivor", pytest.param("whose rank died", marks=pytest.mark.long)]
)
async def test_an_agent_that_is_told_to_end_in_a_recovery_costs_no_step(everstep, told: str):
    """The survivor holds the only complete state: it has to save it before it leaves."""
    command = await everstep("run", "--workers", "2", STUB, STUB_STEP_MS="100")
    ranks = [int((await command.line(rf"rank {r} runs as pid (\d+)"))[1]) for r in (0, 1)]
    agents = [pid_of_agent(pid) for pid in ranks]
    await command.line(r"epoch 1: starts")
    os.kill(ranks[1], signal.SIGKILL)
    os.kill(agents[told == "whose rank died"], signal.SIGTERM)
    assert await command.end() == 0
    assert re.search(r"rank 1 .* killed by signal 9", command.text)
    recoveries = re.findall(r"(?:recovered|moved) in .*", command.text)
    assert len(recoveries) == 1, f"both losses must be one recovery:\n{command.text}"
    assert "steps lost: 0" in command.text
    assert re.search(r"agent of slot \d: left", command.text)
    verify = await everstep("verify", "everstep-store/stub_worker")
    assert await verify.end() == 0
    assert "steps 1 to 20 once each" in verify.text


async def test_the_command_ends_with_its_words_said_and_without_finalizing_the_interpreter():
    code = (
        "import atexit; from everstep_agent import cli;"
        "atexit.register(print, 'finalized'); print('said', end=''); cli.leave(7)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert (process.returncode, said) == (7, b"said")


async def test_a_run_in_another_pid_namespace_leaves_a_living_run_its_memory(everstep, tmp_path):
    """Like two containers that share /dev/shm: neither sees the other's processes."""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    probe = await asyncio.create_subprocess_exec(*apart, "true", stderr=asyncio.subprocess.DEVNULL)
    if await probe.wait() != 0:
        pytest.skip("this machine gives no namespaces to ordinary users")
    first = await everstep("run", "--workers", "1", "--run", "first", STUB, STUB_UNTIL="100000")
    await first.line(r"rank 0 runs as pid \d+")
    memory = memory_of(first)
    second = await asyncio.create_subprocess_exec(
        *apart, sys.executable, "-m", "everstep_agent.cli", "run", "--workers", "1", "--run", "second", STUB,
        cwd=tmp_path, env={**os.environ, "STUB_UNTIL": "3"},
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    async with asyncio.timeout(90):
        assert await second.wait() == 0
    assert memory.exists()
    first.process.send_signal(signal.SIGINT)
    assert await first.end() == 130
    assert not memory.exists()


async def test_the_memory_of_a_run_that_was_killed_is_removed_by_the_next(everstep):
    killed = await everstep("run", "--workers", "1", STUB, STUB_UNTIL="100000")
    await killed.line(r"rank 0 runs as pid \d+")
    memory = memory_of(killed)
    killed.process.kill()
    await killed.process.wait()
    assert memory.exists()
    again = await everstep("run", "--workers", "1", STUB)
    assert await again.end() == 0
    assert not memory.exists()
