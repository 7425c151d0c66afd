"""A fork of the test's process that is root of a mount namespace of its own: it fills file systems, and has imported
torch already.
"""

import ctypes
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
NOT_ALLOWED = 77
_libc = ctypes.CDLL(None, use_errno=True)


class NotAllowed(Exception):
    """This machine lets nobody mount a tmpfs in a namespace of his own."""


def call_apart(act: Callable[[], None], output: Path) -> str:
    """What it printed, which is also in the file `output`. An exception of `act` fails the test."""
    pid = os.fork() or _run(act, output)
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    said = output.read_text()
    assert ended is not None
    if ended.si_status == NOT_ALLOWED:
        pytest.skip(f"this machine lets nobody mount a tmpfs in a namespace of his own: {said}")
    assert ended.si_status == 0, said[-6000:]
    return said


def mount_tmpfs(folder: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotAllowed(done.stderr)


def _run(act: Callable[[], None], output: Path) -> NoReturn:
    status = 1
    try:
        number = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(number, 1)
        os.dup2(number, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        _become_root()
        act()
        status = 0
    except NotAllowed as error:
        print(error)
        status = NOT_ALLOWED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _become_root() -> None:
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        raise NotAllowed(os.strerror(ctypes.get_errno()))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
