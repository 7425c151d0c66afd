"""Workers forked from a zygote, as real processes. None of them imports torch."""

import asyncio
import ctypes
import io
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from everstep_agent import agent, cli, command_line, logline
from everstep_agent.pod import spawn, zygote, zygote_spawner
from everstep_agent.pod.zygote import Program
from everstep_agent.pod.zygote_spawner import ZygoteSpawner
from everstep_contract import env
from everstep_contract.units import Mesh

LIMIT = 60
ENV = {**os.environ, "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True)
class End:
    status: int
    out: str
    err: str


class Zygotes:
    """Starts scripts through a zygote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = io.StringIO()
        self.spawner: ZygoteSpawner | None = None
        self.script = folder / "train.py"

    async def open(
        self, script: str, *args: str, warm: tuple[str, ...] = (), preload: tuple[str, ...] = ()
    ) -> ZygoteSpawner:
        self.script.write_text(textwrap.dedent(script))
        self.fresh = spawn.SubprocessSpawner(str(self.script), args)
        program = Program(script=str(self.script), args=args, warm=warm, preload=preload)
        self.spawner = ZygoteSpawner(program, self.fresh)
        await self.spawner.open(ENV, logline.Log(self.said))
        return self.spawner

    def lines(self, event: str) -> list[dict[str, str]]:
        found = [logline.parse_line(line) for line in self.said.getvalue().splitlines()]
        return [fields for name, fields in filter(None, found) if name == event]

    async def said_once(self, event: str) -> dict[str, str]:
        await until(lambda: bool(self.lines(event)))
        return self.lines(event)[0]

    @property
    def pid(self) -> int:
        assert self.spawner is not None
        (pid,) = self.spawner.pids
        return pid


@pytest.fixture
async def zygotes(tmp_path: Path) -> AsyncIterator[Zygotes]:
    found = Zygotes(tmp_path)
    yield found
    if found.spawner is not None:
        await found.spawner.close()


@pytest.fixture(autouse=True)
def leave_orphans_alone() -> Iterator[None]:
    """Stop adopting orphans, which a zygote makes this process do: other tests do not expect it."""
    yield
    ctypes.CDLL(None).prctl(spawn.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not true():  # noqa: ASYNC110 other processes set no event here
            await asyncio.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end while its file is open
        return True


async def read(fd: int) -> str:
    chunks: list[str] = []
    await _collect(fd, chunks)
    return "".join(chunks)


async def _collect(fd: int, chunks: list[str]) -> None:
    with os.fdopen(fd) as file:
        chunks.append(await asyncio.to_thread(file.read))


async def follow(child: spawn.Spawned) -> End:
    """Wait until the worker has ended; return its output and wait status."""
    async with asyncio.timeout(LIMIT):
        out, err = await asyncio.gather(read(child.stdout), read(child.stderr))
        await spawn.wait_ended(child.pid)
    status = spawn.reap(child.pid)
    assert status is not None, "the agent has no exit status of its worker"
    return End(status, out, err)


def is_forked(child: spawn.Spawned) -> bool:
    return zygote.PROGRAM in Path(f"/proc/{child.pid}/cmdline").read_text()


# --- the same as with the interpreter itself -----------------------------------------------------

SCRIPTS = {
    "returns": "print('out'); import sys; print('err', file=sys.stderr)",
    "status": "import sys; sys.exit(7)",
    "status_text": "import sys; sys.exit('a reason')",
    "exception": """
        def inner():
            raise ValueError('no such data set')
        try:
            {}['key']
        except KeyError:
            inner()
        """,
    "syntax": "print(1\nprint(2)\n",
    "null": "raise SystemExit",
    "interrupt": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "pipe": "import signal; print(signal.getsignal(signal.SIGPIPE), signal.getsignal(signal.SIGINT), "
    "signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGCHLD))",
    "aborts": "import os; os.abort()",
    "atexit": """
        import atexit, sys
        atexit.register(lambda: print('at exit', '__main__' in sys.modules, __name__))
        print('first')
        raise RuntimeError('x')
        """,
    "threads": """
        import threading, time
        def late():
            time.sleep(0.2); print('late', threading.main_thread().name, threading.active_count())
        threading.Thread(target=late).start()
        """,
    "hook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print('hook', kind, error)
        raise ValueError('mine')
        """,
    "main": """
        # -*- coding: utf-8 -*-
        '''The doc.'''
        import builtins, os, pickle, sys
        class Thing: pass
        import __main__
        print(__name__, __file__, __doc__, __package__, __spec__, __builtins__ is builtins)
        print(type(__loader__).__name__, sorted(k for k in globals() if k != '__annotations__'))
        print(sys.argv, sys.orig_argv, sys.path[0], sys.flags, os.getcwd())
        print(__main__.Thing is Thing, pickle.loads(pickle.dumps(Thing)) is Thing, vars(__main__) is globals())
        print(sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.encoding, sys.stdin.read())
        """,
    "descriptors": """
        import os
        print([os.readlink(f'/proc/self/fd/{n}').partition(':')[0] for n in range(3)])
        print([n for n in range(3, 100) if os.path.exists(f'/proc/self/fd/{n}')])
        """,
    "session": "import os; print(os.getsid(0) == os.getpgrp() == os.getpid(), os.getppid())",
    "environment": "import os; print(sorted(os.environ.items()), os.getenv('ONLY'), os.system('env | grep ONLY'))",
    "annotations": "x: 'undefined' = 3; print(__annotations__)",
    "processes": """
        import multiprocessing
        class Thing: pass
        def work(thing): print('worked', type(thing).__name__, __name__)
        def make(_): return Thing()
        if __name__ == '__main__':
            for how in ('spawn', 'fork'):
                p = multiprocessing.get_context(how).Process(target=work, args=(Thing(),))
                p.start(); p.join(); print(how, p.exitcode)
            with multiprocessing.get_context('spawn').Pool(1) as pool:
                print(type(pool.map(make, [1])[0]) is Thing)
        """,
    "beside": "import helper; print(helper.__file__)",
}


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_script_runs_and_ends_as_with_the_interpreter_itself(name: str, zygotes: Zygotes):
    (zygotes.folder / "helper.py").touch()
    spawner = await zygotes.open(SCRIPTS[name], "--lr", "1 2")
    given = {**ENV, "ONLY": "hère"}
    expected = await follow(await zygotes.fresh.spawn(given))
    child = await spawner.spawn(given)
    assert await follow(child) == expected
    assert zygotes.lines("zygote_unused") == []


async def test_the_worker_is_a_fork_and_has_what_was_preloaded(zygotes: Zygotes):
    (zygotes.folder / "slow.py").write_text("import os\nmade_in = os.getpid()\n")
    spawner = await zygotes.open("import slow; print(slow.made_in)", preload=("slow",))
    ends = [await follow(await spawner.spawn(ENV)) for _ in range(2)]
    assert [e.out for e in ends] == [f"{zygotes.pid}\n"] * 2


async def test_workers_that_are_asked_for_together_are_all_forked(zygotes: Zygotes):
    spawner = await zygotes.open("import os; print(os.getpid())")
    children = await asyncio.gather(*(spawner.spawn(ENV) for _ in range(8)))
    ends = await asyncio.gather(*(follow(child) for child in children))
    assert [e.out for e in ends] == [f"{child.pid}\n" for child in children]
    assert zygotes.lines("zygote_unused") == []


async def test_workers_of_one_zygote_draw_different_numbers(zygotes: Zygotes):
    script = "import random, numpy; print(random.random(), numpy.random.random())"
    spawner = await zygotes.open(script, warm=("numpy", "numpy.random", "random"))
    first, second = [(await follow(await spawner.spawn(ENV))).out.split() for _ in range(2)]
    assert len(first) == 2
    assert set(first).isdisjoint(second)
    assert zygotes.lines("zygote_unused") == [], "numpy's idle threads must not prevent the fork"


async def test_what_a_preloaded_module_has_open_is_not_inherited(zygotes: Zygotes):
    (zygotes.folder / "opens.py").write_text("file = open(__file__)\n")
    script = "import os, opens; print(os.readlink(f'/proc/self/fd/{opens.file.fileno()}'))"
    spawner = await zygotes.open(script, preload=("opens",))
    assert (await follow(await spawner.spawn(ENV))).out == "/dev/null\n"


async def test_a_worker_that_is_killed_takes_its_children_along(zygotes: Zygotes):
    script = """
        import subprocess, sys, time
        p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
        print(p.pid, flush=True)
        time.sleep(600)
        """
    spawner = await zygotes.open(script)
    worker = await spawner.spawn(ENV)
    assert is_forked(worker)
    with os.fdopen(worker.stdout) as out:
        child = int(await asyncio.to_thread(out.readline))
    os.kill(worker.pid, signal.SIGKILL)
    await spawn.wait_ended(worker.pid)
    assert spawn.describe_exit(spawn.reap(worker.pid)) == "killed by signal 9 (SIGKILL)"
    await until(lambda: is_gone(child))
    os.close(worker.stderr)


# --- where it cannot fork ------------------------------------------------------------------------

SHOW = "import os; print(open('/proc/self/cmdline').read())"


async def use(zygotes: Zygotes, spawner: ZygoteSpawner) -> bool:
    """Start a worker and wait for its end; return whether it was forked. The script must run either way."""
    end = await follow(await spawner.spawn(ENV))
    assert end.status == 0, end.err
    return zygote.PROGRAM in end.out


async def test_a_preloaded_module_with_a_thread_costs_the_fork_and_is_reported_once(
    zygotes: Zygotes,
):
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    (zygotes.folder / "threads.py").write_text(source)
    spawner = await zygotes.open(SHOW, preload=("threads",))
    assert [await use(zygotes, spawner) for _ in range(2)] == [False, False]
    (said,) = zygotes.lines("zygote_unused")
    assert "it has 2 threads" in said["message"]
    assert "--preload threads" in said["message"]
    assert "--no-zygote" in said["message"]


@pytest.mark.parametrize("how", ["is_initialized", "_is_in_bad_fork"])
async def test_a_zygote_that_used_cuda_is_not_forked(how: str, zygotes: Zygotes):
    package = zygotes.folder / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cuda.py").write_text(f"def {how}():\n    return True\n")
    spawner = await zygotes.open(SHOW, preload=("torch.cuda",))
    assert not await use(zygotes, spawner)
    (said,) = zygotes.lines("zygote_unused")
    assert "CUDA" in said["message"]


async def test_a_zygote_that_holds_a_device_is_not_forked(zygotes: Zygotes):
    source = "import __main__\n__main__.DEVICES = (__file__,)\nfile = open(__file__)\n"
    (zygotes.folder / "driver.py").write_text(source)
    spawner = await zygotes.open(SHOW, preload=("driver",))
    assert not await use(zygotes, spawner)
    (said,) = zygotes.lines("zygote_unused")
    assert "it holds" in said["message"]
    assert "driver.py" in said["message"]


async def test_a_preloaded_module_that_raises_is_reported_and_left_out(zygotes: Zygotes):
    (zygotes.folder / "broken.py").write_text("raise ValueError('no licence')\n")
    (zygotes.folder / "leaves.py").write_text("raise SystemExit(3)\n")
    (zygotes.folder / "sound.py").write_text("print('a line of sound')\n")
    preload = ("broken", "leaves", "absent", "sound")
    spawner = await zygotes.open(SHOW, warm=("unknown_library",), preload=preload)
    assert await use(zygotes, spawner)
    said = {s["module"]: s["message"] for s in zygotes.lines("zygote_import_failed")}
    assert set(said) == {"broken", "leaves", "absent"}
    assert "ValueError: no licence" in said["broken"]
    assert "--preload" in said["absent"]
    await until(
        lambda: any("a line of sound" in s["message"] for s in zygotes.lines("zygote_output"))
    )
    assert any("broken.py" in s["message"] for s in zygotes.lines("zygote_output"))


async def test_a_zygote_that_was_killed_is_started_again_and_its_workers_live_on(zygotes: Zygotes):
    spawner = await zygotes.open("import time; time.sleep(600)")
    worker = await spawner.spawn(ENV)
    first = zygotes.pid
    os.kill(first, signal.SIGKILL)
    said = await zygotes.said_once("zygote_ended")
    assert "killed by signal 9 (SIGKILL)" in said["message"]
    meanwhile = await spawner.spawn(ENV)
    assert not is_forked(meanwhile)
    await until(lambda: len(zygotes.lines("zygote_ready")) == 2)
    assert zygotes.pid != first
    again = await spawner.spawn(ENV)
    assert is_forked(again)
    for child in (worker, meanwhile, again):
        assert not is_gone(child.pid)
        os.kill(child.pid, signal.SIGTERM)
        assert spawn.describe_exit((await follow(child)).status) == "killed by signal 15 (SIGTERM)"


async def test_a_zygote_that_does_not_answer_is_replaced(
    zygotes: Zygotes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(zygote, "ANSWER_SECONDS", 0.5)
    spawner = await zygotes.open(SHOW)
    await zygotes.said_once("zygote_ready")
    os.killpg(zygotes.pid, signal.SIGSTOP)
    assert not await use(zygotes, spawner)
    assert "has not answered" in zygotes.lines("zygote_unused")[0]["message"]
    await zygotes.said_once("zygote_ended")


async def test_a_zygote_that_imports_too_long_is_not_waited_for(
    zygotes: Zygotes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(zygote, "WARM_SECONDS", 0.5)
    (zygotes.folder / "endless.py").write_text("import time\ntime.sleep(600)\n")
    spawner = await zygotes.open(SHOW, preload=("endless",))
    assert not await use(zygotes, spawner)
    assert "still imports" in zygotes.lines("zygote_unused")[0]["message"]


async def test_a_preload_that_ends_the_zygote_each_time_is_given_up(
    zygotes: Zygotes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(zygote_spawner, "PAUSE_SECONDS", (0.0,))
    (zygotes.folder / "ends.py").write_text("import os\nos._exit(9)\n")
    spawner = await zygotes.open(SHOW, preload=("ends",))
    await zygotes.said_once("zygote_given_up")
    assert len(zygotes.lines("zygote_ended")) == zygote_spawner.COLD_DEATHS - 1
    assert not await use(zygotes, spawner)
    assert "exited with status 9" in zygotes.lines("zygote_unused")[0]["message"]


async def test_a_script_that_is_no_source_has_no_zygote(zygotes: Zygotes):
    import zipfile

    path = zygotes.folder / "app.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("__main__.py", SHOW)
    spawner = ZygoteSpawner(Program(script=str(path)), spawn.SubprocessSpawner(str(path)))
    await spawner.open(ENV, logline.Log(zygotes.said))
    assert not await use(zygotes, spawner)
    assert "no Python source" in zygotes.lines("zygote_unused")[0]["message"]


async def test_a_start_that_is_cancelled_leaves_no_worker(zygotes: Zygotes):
    """A forked worker runs nothing of the script before its agent tells it to go."""
    ran, others = zygotes.folder / "ran", set(children())
    spawner = await zygotes.open(f"open({str(ran)!r}, 'w')")
    await zygotes.said_once("zygote_ready")
    os.killpg(zygotes.pid, signal.SIGSTOP)
    start = asyncio.create_task(spawner.spawn(ENV))
    await asyncio.sleep(0)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    os.killpg(zygotes.pid, signal.SIGCONT)
    assert (await follow(await spawner.spawn(ENV))).status == 0
    ran.unlink()
    await until(lambda: len(set(children()) - others) == 1)
    assert not ran.exists()


def children() -> list[int]:
    """Return this process's children, after reaping the adopted ones that have ended."""
    spawn.reap_orphans(set())
    return list_children(os.getpid())


AGENT = """
import asyncio, os, sys
from everstep_agent import agent, cli, logline
from everstep_agent.pod import spawn
from everstep_agent.pod.zygote import Program
from everstep_agent.pod.zygote_spawner import ZygoteSpawner
async def main():
    script = sys.argv[1]
    spawner = ZygoteSpawner(Program(script=script), spawn.SubprocessSpawner(script))
    await spawner.open(os.environ, logline.Log())
    worker = await spawner.spawn(os.environ)
    print(*spawner.pids, worker.pid, os.getpid(), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_the_agents_end_ends_zygote_and_workers(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import time; time.sleep(600)")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AGENT, str(script), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    pids = [int(p) for p in (await asyncio.wait_for(process.stdout.readline(), LIMIT)).split()]
    assert len({*pids}) == 3
    (between,) = await between_of(pids[0])
    pids.append(between)
    assert not any(is_gone(p) for p in pids)
    process.kill()
    await process.wait()
    await until(lambda: all(is_gone(p) for p in pids))


def test_the_options_of_a_pods_command_count_in_a_cluster():
    given = {
        "EVERSTEP_" + name: "x"
        for name in ("JOB", "JOB_UID", "TOKEN", "POD_IP", "URI", "RUN", "MEMORY")
    }
    given |= {"EVERSTEP_SLOT": "0", "EVERSTEP_ATTEMPT": "0"}
    settings = env.AgentEnv.from_env(given)
    assert (settings.zygote, settings.preload, settings.warm) == (None, None, None)
    assert env.AgentEnv.from_env(settings.to_env()) == settings
    line = ["run", "--preload", "a,b.c", "train.py"]
    settings = cli.add_options(settings, command_line.parse(line))
    program = agent.build_program(settings, "train.py", ["--lr", "1"], (1, 2))
    assert (program.preload, program.warm) == (("a", "b.c"), zygote_spawner.WARM)
    units = replace(settings, mesh=Mesh(shard=2))
    warm = agent.build_program(units, "train.py", [], (1, 2)).warm
    assert warm == zygote_spawner.WARM + zygote_spawner.WARM_FOR_UNITS
    settings = cli.add_options(settings, command_line.parse(["run", "--no-zygote", "train.py"]))
    assert settings.zygote == 0
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert type(agent.build_spawner(settings, "train.py", [])) is spawn.SubprocessSpawner
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def between_of(zygote: int) -> list[int]:
    """Return the child of the zygote that waits for the next request."""
    await until(lambda: bool(list_children(zygote)))
    return list_children(zygote)


def list_children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_the_process_between_is_replaced_and_ends_with_the_zygote(zygotes: Zygotes):
    spawner = await zygotes.open(SHOW)
    await zygotes.said_once("zygote_ready")
    (first,) = await between_of(zygotes.pid)
    os.kill(first, signal.SIGKILL)
    await until(lambda: is_gone(first))
    assert await use(zygotes, spawner)
    (second,) = await between_of(zygotes.pid)
    os.kill(zygotes.pid, signal.SIGKILL)
    await until(lambda: is_gone(second))


async def test_close_ends_the_zygote(zygotes: Zygotes):
    spawner = await zygotes.open(SHOW)
    pid = zygotes.pid
    await spawner.close()
    assert is_gone(pid)
    assert spawner.pids == ()
