"""The launcher in the operator's role, in this process: real agents, real kills."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.test_run import STUB, pid_of_agent
from everstep_agent.local import agent_process, launcher, memory_folder, whom_to_ask
from everstep_agent.local.agent_process import AgentProcess, LocalJob
from everstep_agent.local.plan import build_plan
from everstep_agent.peers import http
from everstep_agent.storage.address import parse_uri
from everstep_contract import codec, env, levels, names, report

pytestmark = pytest.mark.timeout(240)


class Run:
    """A run of two workers, stubs if no script is given; `said` holds the launcher's output lines."""

    def __init__(
        self,
        folder: Path,
        hang_seconds: float = 60.0,
        drill: bool = False,
        script: str = STUB,
        spares: int = 0,
        save_every: int = 0,
    ) -> None:
        self.said: list[str] = []
        self._new = asyncio.Event()
        plan = build_plan(
            script=script, args=(), workers=2, store="store", run="r", save_every=save_every, keep=2,
            hang_seconds=hang_seconds, guard_action="Note", guard_factor=10.0, verbose=False, folder=str(folder),
            drill=drill, spares=spares,
        )  # fmt: skip
        self.launcher = launcher.Launcher(plan, say=self._say)

    def _say(self, line: str) -> None:
        self.said.append(line)
        self._new.set()

    async def line(self, pattern: str, since: int = 0) -> re.Match[str]:
        """Wait for the first line that matches, after the first `since` lines."""
        async with asyncio.timeout(60):
            while True:
                self._new.clear()
                for text in self.said[since:]:
                    if found := re.search(pattern, text):
                        return found
                await self._new.wait()


async def test_agents_that_are_lost_again_and_again_end_no_run_that_takes_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "LOST_AGENTS", 1)
    monkeypatch.setenv("STUB_UNTIL", "100")  # long enough for two kills
    run = Run(tmp_path)
    running = asyncio.create_task(run.launcher.run())
    for _ in range(2):
        begun = len(run.said)
        worker = int((await run.line(r"rank 1 runs as pid (\d+)", begun))[1])
        seen = run.launcher.seen.step
        async with asyncio.timeout(60):
            while run.launcher.seen.step <= seen:  # noqa: ASYNC110 told twice a second
                await asyncio.sleep(0.05)
        os.kill(pid_of_agent(worker), signal.SIGKILL)
    assert await running == 0
    assert sum("lost: killed by signal 9" in line for line in run.said) == 2


async def test_a_spare_takes_the_place_of_a_lost_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_UNTIL", "400")
    run = Run(tmp_path, spares=1)
    running = asyncio.create_task(run.launcher.run())

    async def until_members(
        known: set[tuple[int, int]],
    ) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """Wait for two members other than `known`, and a spare; return (slot, attempt) of both kinds."""
        async with asyncio.timeout(60):
            while True:
                seen = run.launcher.seen
                members, spares = (
                    {(one.slot, one.attempt) for one in listed}
                    for listed in (seen.members, seen.spares)
                )
                if seen.running and spares and len(members) == 2 and members != known:
                    return members, spares
                await asyncio.sleep(0.05)

    before, spares = await until_members(set())
    worker = int((await run.line(r"rank 1 runs as pid (\d+)"))[1])
    os.kill(pid_of_agent(worker), signal.SIGKILL)
    after, _ = await until_members(before)
    lost = max(before)  # ranks follow slot order
    assert lost not in after
    # Usually the spare takes the lost member's place. But all ranks restart here, so the slot's next agent can be ready
    # as early, or both before the survivor. Recovery in place takes the spare (tests/runtime/test_spares.py).
    assert after <= before | spares | {(lost[0], lost[1] + 1)}
    assert await running == 0


async def test_agents_that_are_lost_without_a_step_in_between_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "LOST_AGENTS", 1)
    monkeypatch.setenv("STUB_MODE", "crash")
    assert await Run(tmp_path).launcher.run() == 1
    said = capsys.readouterr().err
    assert "2 agents were lost without a new step" in said
    last = (
        "3 workers in a row ended before they could join the training: killed by signal 9 (SIGKILL)"
    )
    assert f"the last one: {last}" in said


async def test_an_agent_that_stands_still_is_killed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "CALL_SECONDS", 0.5)
    monkeypatch.setattr(whom_to_ask, "REPEAT_SECONDS", 0.5)
    monkeypatch.setenv("STUB_UNTIL", "100")
    run = Run(tmp_path)
    running = asyncio.create_task(run.launcher.run())
    worker = int((await run.line(r"rank 1 runs as pid (\d+)"))[1])
    os.kill(pid_of_agent(worker), signal.SIGSTOP)
    await run.line("agent of slot 1 does not answer any more: it is killed")
    await run.line("agent of slot 1 lost: killed by signal 9")
    assert await running == 0
    assert run.launcher.seen.step == 100


async def test_an_agent_that_refuses_connections_is_killed_only_if_it_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that ends closes its address first."""
    monkeypatch.setattr(launcher, "CALL_SECONDS", 0.5)
    run = Run(tmp_path)

    async def answer(_: bytes) -> bytes:
        return codec.dumps(levels.Seen())

    server = http.Server(run.launcher._job.token, {names.WANTED_PATH: answer})
    await server.open("127.0.0.1", 0)
    killed: list[int] = []
    agent = SimpleNamespace(
        slot=0, alive=True, address=server.address, kill=lambda: killed.append(0)
    )
    run.launcher._slots[0] = agent  # type: ignore[assignment]
    assert await run.launcher._post(agent.address, levels.Wanted()) is not None
    await server.close()
    for _ in range(2 * launcher.MISSED_ANSWERS):
        assert await run.launcher._post(agent.address, levels.Wanted()) is None
        run.launcher._kill_silent()
    assert killed == []
    await asyncio.sleep(launcher.MISSED_ANSWERS * launcher.CALL_SECONDS)
    run.launcher._kill_silent()
    assert killed == [0]
    run.launcher._memory.remove()


async def test_no_agent_is_killed_because_the_launcher_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-Z and fg: a call that timed out while the launcher stood still is no missed answer. The other agent
    may take the stopped one for lost.
    """
    monkeypatch.setattr(launcher, "CALL_SECONDS", 2.0)
    monkeypatch.setattr(launcher, "LATE_SECONDS", 0.2)
    monkeypatch.setattr(whom_to_ask, "REPEAT_SECONDS", 0.5)
    monkeypatch.setenv("STUB_UNTIL", "100")
    run = Run(tmp_path)
    running = asyncio.create_task(run.launcher.run())
    agent = pid_of_agent(int((await run.line(r"rank 1 runs as pid (\d+)"))[1]))
    for _ in range(launcher.MISSED_ANSWERS + 1):
        os.kill(agent, signal.SIGSTOP)
        await asyncio.sleep(0.7)  # the launcher has called the agent and waits for its answer
        time.sleep(2.5)  # noqa: ASYNC251
        os.kill(agent, signal.SIGCONT)
    assert await running == 0
    assert not [line for line in run.said if "it is killed" in line], run.said
    assert run.launcher.seen.step == 100


async def test_when_an_agent_ends_because_its_script_does_not_start_the_others_save(
    tmp_path: Path,
) -> None:
    """The script was edited while the run trained, and a new worker fails before it joins."""
    run = Run(tmp_path)
    reports = run.launcher.reports
    reports[1] = report.ExitReport(cause=report.Cause.SCRIPT_ERROR, message="SyntaxError")
    agent = SimpleNamespace(
        slot=0, attempt=0, alive=True, process=SimpleNamespace(wait=asyncio.Event().wait)
    )

    async def save(body: bytes) -> bytes:
        if codec.loads(levels.Wanted, body).stop is not levels.Stop.NONE:
            agent.alive = False
            reports[0] = report.ExitReport(cause=report.Cause.STOPPED, message="saved")
        return codec.dumps(levels.Seen())

    server = http.Server(run.launcher._job.token, {names.WANTED_PATH: save})
    await server.open("127.0.0.1", 0)
    agent.address = server.address
    run.launcher._slots[0] = agent  # type: ignore[assignment]
    assert await asyncio.wait_for(run.launcher._operate(), 30) == 1
    assert reports[0].cause is report.Cause.STOPPED
    await server.close()
    run.launcher._memory.remove()


async def test_it_waits_for_an_agent_once_however_long_the_run_takes(tmp_path: Path) -> None:
    """asyncio keeps whoever waited for a process, even if cancelled: 20 MB a day for each agent."""
    waited, over = 0, asyncio.Event()

    async def wait() -> int:
        nonlocal waited
        waited += 1
        await over.wait()
        return 0

    run = Run(tmp_path)
    agent = SimpleNamespace(slot=0, attempt=0, alive=True, process=SimpleNamespace(wait=wait))
    run.launcher._slots[0] = agent  # type: ignore[assignment]
    for _ in range(5):
        await run.launcher._wait(0.001)
    assert waited == 1
    over.set()
    await asyncio.wait_for(run.launcher._wait(600.0), 30)
    run.launcher._memory.remove()


def test_an_end_of_the_job_is_not_taken_for_a_script_that_does_not_start(tmp_path: Path) -> None:
    """The first agent may end before the launcher has asked the coordinator again."""
    run = Run(tmp_path)
    run.launcher.reports[1] = report.ExitReport(
        cause=report.Cause.MISUSE, message="rank 0: main returned after step 2", epoch=1, step=2
    )
    run.launcher._let_others_save()
    assert run.said == []
    run.launcher._memory.remove()


async def test_an_agent_that_cannot_be_replaced_lets_the_others_save_and_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_UNTIL", "1000000")
    run, start = Run(tmp_path), agent_process.start

    async def start_once(job: LocalJob, slot: int, attempt: int) -> AgentProcess:
        if attempt:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start(job, slot, attempt)

    monkeypatch.setattr(agent_process, "start", start_once)
    running = asyncio.create_task(run.launcher.run())
    await run.line(r"rank 1 runs as pid (\d+)")
    async with asyncio.timeout(60):
        while run.launcher.seen.step < 5:  # noqa: ASYNC110 told twice a second
            await asyncio.sleep(0.05)
    run.launcher._slots[1].kill()
    assert await running == 1
    said = "\n".join(run.said)
    assert "the agent of slot 1 cannot be replaced: [Errno 11] Resource temporarily" in said
    assert "the others save and stop" in said
    assert run.launcher.reports[0].cause is report.Cause.STOPPED
    assert run.launcher.seen.committed is not None


@pytest.mark.parametrize(
    ("seen", "limit", "lost"),
    [
        (levels.Seen(), launcher.NO_STEP_SECONDS, "no step was taken yet"),
        (levels.Seen(step=7), launcher.STOP_SECONDS, "all steps are lost"),
    ],
)
async def test_a_save_that_takes_too_long_after_ctrl_c_is_given_up_and_reported(
    tmp_path: Path, seen: levels.Seen, limit: float, lost: str
) -> None:
    """A store that does not answer may hold a run up before its first step, when nothing can be lost."""
    run = Run(tmp_path)
    agent = SimpleNamespace(slot=0, attempt=0, alive=True, address="", kill=lambda: None)
    run.launcher._slots[0] = agent  # type: ignore[assignment]
    run.launcher._interrupt()
    run.launcher.seen = seen
    assert not run.launcher._is_late(run.launcher._stop_at + limit - 0.1, None)
    assert run.launcher._is_late(run.launcher._stop_at + limit + 0.1, None)
    run.launcher._end_without_save()
    run.launcher._end_without_save()
    (said,) = [line for line in run.said if f"not saved within {limit:.0f} s" in line]
    assert said.endswith(f"stopping without it; {lost}")
    run.launcher._memory.remove()


@pytest.mark.parametrize("error", [False, True])
def test_a_flood_of_lines_is_passed_on_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: bool
) -> None:
    """Line by line, the launcher was slower than a single worker that prints, and its agents dropped lines."""
    pieces: list[str] = []
    stream = SimpleNamespace(write=pieces.append, flush=lambda: None)
    run = Run(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr" if error else "stdout", stream)
        run.launcher._show(["one", "everstep event=uploaded step=1", "", "two"], error)
    assert pieces == ["one\n\ntwo\n" if error else "one\neverstep event=uploaded step=1\n\ntwo\n"]
    run.launcher._memory.remove()


def test_a_machine_without_room_for_a_folder_is_told_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Run(tmp_path).launcher
    made._memory.remove()
    monkeypatch.setattr(memory_folder, "find_parent", lambda: tmp_path / "gone")
    assert launcher.launch(made._plan) == 2
    said = capsys.readouterr().err
    assert said.startswith("everstep: cannot create a folder in memory for the run: ")
    assert str(tmp_path / "gone") in said


async def test_a_signal_that_arrives_twice_is_one_request_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeout 1h everstep run …` sends one to the process and one to its process group."""
    monkeypatch.setattr(launcher, "TWICE_SECONDS", 1000.0)
    run = Run(tmp_path)
    run.launcher._interrupt()
    run.launcher._interrupt()
    assert not run.launcher._is_late(time.monotonic(), None), "it saves first"
    monkeypatch.setattr(launcher, "TWICE_SECONDS", 0.0)
    run.launcher._interrupt()
    assert run.launcher._is_late(time.monotonic(), None)
    run.launcher._memory.remove()


async def test_under_nohup_a_closed_terminal_stops_nothing(tmp_path: Path) -> None:
    run, loop = Run(tmp_path), asyncio.get_running_loop()
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run.launcher._catch_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGHUP, former)
        run.launcher._memory.remove()


async def test_a_second_run_says_that_it_takes_over_and_the_first_that_it_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUB_UNTIL", "100000")
    first, second = Run(tmp_path, save_every=20), Run(tmp_path, save_every=20)
    running = asyncio.create_task(first.launcher.run())
    await first.line("checkpoint: step .* committed")
    assert not [line for line in first.said if "taken over" in line]
    other = asyncio.create_task(second.launcher.run())
    await second.line("trains this run: it is taken over")
    assert await running == 1
    assert "has taken the run over" in capsys.readouterr().err
    assert "this one has stopped" in first.said[-1]
    os.kill(os.getpid(), signal.SIGINT)
    assert await other == 130


def test_the_ranks_share_the_cores_that_the_command_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under `taskset`, or as a part of a larger machine's job, these are not all cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    settings = env.AgentEnv(
        job="local/r", job_uid="u", slot=0, attempt=0, token="t", pod_ip="", uri="file:///s", run="r", memory="/m"
    )  # fmt: skip
    assert agent_process.build_environ({}, settings, workers=4)["OMP_NUM_THREADS"] == "2"
    given = agent_process.build_environ({"OMP_NUM_THREADS": "5"}, settings, workers=4)
    assert given["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize("name", ["exp#1", "what?", "50%20", "a b", "ü", os.fsdecode(b"\xff")])
def test_a_folder_with_any_name_holds_the_store(name: str) -> None:
    plan = build_plan(
        script="train.py", args=(), workers=1, store="store", run="r", save_every=0, keep=2,
        hang_seconds=1.0, guard_action="Note", guard_factor=10.0, verbose=False, folder=f"/x/{name}",
    )  # fmt: skip
    assert plan.store_folder == f"/x/{name}/store"
    assert plan.place == f"/x/{name}/store/r"
    address = parse_uri(plan.uri, plan.run)
    assert parse_uri(address.uri).bucket == plan.place, "its URI names the same folder again"


@pytest.mark.parametrize("store", ["s3://bucket/folder", "s3://bucket/folder/", "s3://bucket"])
def test_the_place_of_a_run_is_an_address_that_other_commands_take(store: str) -> None:
    plan = build_plan(
        script="train.py", args=(), workers=1, store=store, run="r", save_every=0, keep=2,
        hang_seconds=1.0, guard_action="Note", guard_factor=10.0, verbose=False, folder="/x",
    )  # fmt: skip
    assert parse_uri(plan.place) == parse_uri(store, "r")


def test_a_file_of_the_current_folder_replaces_no_module_of_an_agent(tmp_path: Path) -> None:
    """Of the script it may, as with `python train.py`, if both are in one folder."""
    (tmp_path / "argparse.py").write_text("raise SystemExit('the wrong argparse')\n")
    command = [*agent_process.PROGRAM, "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:9]) == (0, "everstep "), done.stderr


@pytest.mark.long
async def test_an_agent_whose_worker_outlives_sigkill_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "flag"
    monkeypatch.setenv("STUB_MODE", f"stuck:6:{flag}")
    run = Run(tmp_path, hang_seconds=1.0)
    try:
        assert await run.launcher.run() == 0
        if not flag.read_text().startswith("seized"):
            pytest.skip(f"this kernel does not let a process be traced: {flag.read_text()}")
    finally:
        flag.unlink(missing_ok=True)
    assert any("agent of slot 1 lost: rank 1 has not ended" in line for line in run.said)
    assert sum(run.launcher.seen.restarts.values()) == 1


async def test_a_drill_kills_a_rank_shows_what_it_cost_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_UNTIL", "1000000")
    run = Run(tmp_path, drill=True)
    assert await run.launcher.run() == 0
    said = "\n".join(run.said)
    assert "drill: SIGKILL to rank 1" in said
    assert "steps lost         0" in said
    assert "everstep verify" in said
    assert "stopped on request" in said


async def test_a_run_that_is_too_short_for_a_drill_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_UNTIL", "3")
    run = Run(tmp_path, drill=True)
    assert await run.launcher.run() == 0
    assert "no rank was killed" in run.said[-1]


async def test_the_deaths_of_a_long_run_are_not_all_published(tmp_path: Path) -> None:
    """Each exchange sends them to the agents."""
    made = Run(tmp_path).launcher
    for attempt in range(50):
        for slot in (0, 1):
            made._note_death(SimpleNamespace(slot=slot, attempt=attempt), None)  # type: ignore[arg-type]
    newest = range(50 - launcher.DEAD_KEPT, 50)
    found = [(d.slot, d.attempt) for d in made._wanted().dead]
    assert found == [(slot, attempt) for attempt in newest for slot in (0, 1)]
