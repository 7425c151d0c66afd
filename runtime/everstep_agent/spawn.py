"""Starting worker processes, and knowing for certain when one has ended.

A worker leads its own session, so that it can be killed with all its children: a surviving
duplicate of its sockets (a forked data loader's, say) keeps the peers blind (measured: 6 s instead
of 12 ms). It dies with its agent through the parent-death signal, which follows the forking
*thread*: spawn from the main thread only.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl


@dataclass(slots=True)
class Spawned:
    """A child that has not been reaped; the two descriptors are the read ends of its output."""

    pid: int
    stdout: int
    stderr: int
    keep: object = None
    """Held until the child is reaped."""


class Spawner(Protocol):
    def spawn(self, env: Mapping[str, str]) -> Spawned: ...


class SubprocessSpawner:
    """Runs the user's script with the interpreter that runs the agent."""

    def __init__(self, script: str, args: Sequence[str] = ()) -> None:
        self._command = [sys.executable, script, *args]

    def spawn(self, env: Mapping[str, str]) -> Spawned:
        process = subprocess.Popen(
            self._command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno())
        process.stdout.close()
        process.stderr.close()
        process.returncode = 0  # the agent reaps by pid; Popen must never wait for it, now or later
        return Spawned(pid=process.pid, stdout=out, stderr=err, keep=process)


class ForkSpawner:
    """Forks this process and calls `target`: no interpreter start, no imports. Everything above
    stderr is closed first.
    """

    def __init__(self, target: Callable[[], None]) -> None:
        self._target = target

    def spawn(self, env: Mapping[str, str]) -> Spawned:
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


def become_subreaper() -> None:
    """Orphans of our workers become our children: without it their exit status is nobody's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(pid: int) -> int | None:
    """Wait status of a child that has ended; its whole group is killed before the pid can be given
    away again.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if found == pid else None


def reap_orphans(ours: set[int]) -> None:
    """Collect the ended children that are not workers (adopted ones)."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in ours:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended.si_pid, os.WNOHANG)


def describe_exit(status: int | None) -> str:
    if status is None:
        return "ended, exit status lost"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "unknown"
        return f"killed by signal {number} ({name})"
    return f"exited with status {os.WEXITSTATUS(status)}"
