"""Starts worker processes, and detects reliably when one has ended.

A worker leads its own session, so that it can be killed with all its children. If a child survived
with a duplicate of the worker's sockets (a forked data loader, say), the peers would notice the
death later (measured: after 6 s instead of 12 ms). A worker dies with its agent through the
parent-death signal. This signal is bound to the forking *thread*: spawn from the main thread only.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from everstep_agent import logline
from everstep_agent.pod.proc_stat import read_stat

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REAP_POLL_SECONDS = 0.02
Limits = tuple[int, int]
"""Soft and hard limit."""
_prctl = ctypes.CDLL(None, use_errno=True).prctl


@dataclass(slots=True)
class Spawned:
    """A child that has not been reaped; the two descriptors are the read ends of its output pipes."""

    pid: int
    stdout: int
    stderr: int
    keep: object = None
    """Kept alive until the child is reaped."""


class Spawner(ABC):
    """Starts workers. `spawn` may wait, on the agent's event loop, but forks in its main thread."""

    async def open(self, env: Mapping[str, str], log: logline.Log) -> None:  # noqa: B027
        """Called once, before the first worker. `env`: the variables that all workers get."""

    @abstractmethod
    async def spawn(self, env: Mapping[str, str]) -> Spawned:
        """Start one worker. Raises OSError if no process can be started now.

        If the call is cancelled, no worker is left. The caller must note the pid before it awaits
        anything else, because a child that nobody has noted is reaped as an orphan.
        """

    async def close(self) -> None:  # noqa: B027
        """End the spawner's own processes, but not the workers."""

    @property
    def pids(self) -> Collection[int]:
        """The spawner's own processes, which it reaps itself."""
        return ()


class SubprocessSpawner(Spawner):
    """Runs the user's script with the agent's own interpreter. `open_files`: limits of open files
    for the script.
    """

    def __init__(
        self, script: str, args: Sequence[str] = (), open_files: Limits | None = None
    ) -> None:
        self._command = [sys.executable, script, *args]
        self._open_files = open_files

    async def spawn(self, env: Mapping[str, str]) -> Spawned:
        return self._start(env)

    def _start(self, env: Mapping[str, str]) -> Spawned:
        process = subprocess.Popen(
            self._command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=self._prepare(os.getpid()),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno())
        process.stdout.close()
        process.stderr.close()
        process.returncode = 0  # the agent reaps by pid; Popen must never wait for this child
        return Spawned(pid=process.pid, stdout=out, stderr=err, keep=process)

    def _prepare(self, parent: int) -> Callable[[], None]:
        arm, limits = die_with(parent), self._open_files

        def prepare() -> None:
            arm()
            if limits is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)

        return prepare


class ForkSpawner(Spawner):
    """Forks this process and calls `target`: no interpreter start, no imports. Closes every
    descriptor above stderr first.

    The child never garbage-collects objects of the parent. An object that closes a descriptor (a
    socket in a reference cycle, say) would close whatever has that number in the child. A
    collective whose socket is closed in this way waits for ever, without an error.
    """

    def __init__(self, target: Callable[[], None]) -> None:
        self._target = target

    async def spawn(self, env: Mapping[str, str]) -> Spawned:
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._child(dict(env), parent, out_write, err_write)
        os.close(out_write)
        os.close(err_write)
        return Spawned(pid=pid, stdout=out_read, stderr=err_read)

    def _child(self, env: dict[str, str], parent: int, out: int, err: int) -> None:
        status = 1
        gc.freeze()
        try:
            os.setsid()
            die_with(parent)()
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.closerange(
                3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 65536 else 65536
            )
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            os.environ.clear()
            os.environ.update(env)
            self._target()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)


def die_with(parent: int) -> Callable[[], None]:
    def arm() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return arm


def raise_open_files() -> Limits:
    """Raise the soft limit of open files to the hard limit: the coordinator has two connections to
    each pod, and container runtimes start with 1024.

    Returns the former limits, for the workers (`select` fails beyond 1024).
    """
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (former[1], former[1]))
    return former


def become_subreaper() -> None:
    """Make orphaned descendants our children, so that they can be reaped."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def list_children(pid: int) -> list[int]:
    """The children of a process's main thread; empty if it is gone, or the kernel does not list them."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def reap(pid: int) -> int | None:
    """The wait status of a child that has ended; None: unknown. Its process group is killed before
    the pid is released for reuse.
    """
    kill_group(pid)
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if found == pid else None


def reap_orphans(ours: set[int]) -> None:
    """Reap ended children that are not ours (adopted orphans)."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in ours:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended.si_pid, os.WNOHANG)


async def wait_ended(pid: int) -> None:
    """Wait until the child is a zombie, without reaping it."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        await _poll_ended(pid)
        return
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def ended() -> None:
        if not done.done():
            done.set_result(None)

    loop.add_reader(fd, ended)
    try:
        await done
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def _poll_ended(pid: int) -> None:
    while not _has_ended(pid):  # noqa: ASYNC110 only where the kernel has no pidfd
        await asyncio.sleep(REAP_POLL_SECONDS)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def describe_state(pid: int) -> str:
    """What a process waits for in the kernel, for a message; empty if unknown."""
    try:
        state = read_stat(f"/proc/{pid}")[0]
        with open(f"/proc/{pid}/wchan") as file:
            place = file.read().strip()
    except (OSError, IndexError):
        return ""
    return f", state {state}" + (f" in {place}" if place not in ("", "0") else "")


def was_killed(status: int) -> bool:
    """Whether a wait status is that of SIGKILL."""
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def describe_exit(status: int | None) -> str:
    if status is None:
        return "ended, exit status unknown"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "unknown"
        return f"killed by signal {number} ({name})"
    return f"exited with status {os.WEXITSTATUS(status)}"
