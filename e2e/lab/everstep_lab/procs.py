"""Child processes that die with their parent, and the list of running processes (Linux)."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MARK = "EVERSTEP_LAB_MARK"
"""Environment variable with the lab's folder, set in all its processes to identify leftovers."""

_PREFERRED = -10

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make this process a child subreaper: orphaned descendants become its children."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when its parent ends. Call it in the child.

    The kernel sends the signal when the *thread* that forked ends, so fork from the main thread.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _libc.prctl(PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def spawn(
    argv: Sequence[str],
    *,
    log: Path | None,
    mark: Path | str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    death_signal: int = signal.SIGKILL,
    pass_fds: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start a child in its own session; append its output to `log`. Call from the main thread."""
    parent = os.getpid()
    out = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=cwd,
            env={**(os.environ if env is None else env), MARK: str(mark)},
            start_new_session=True, pass_fds=pass_fds,
            preexec_fn=lambda: die_with_parent(parent, death_signal),
        )  # fmt: skip
    finally:
        os.close(out)


def prefer(pid: int) -> bool:
    """Give the session of `pid` a higher priority than pods. False: that is not permitted.

    Each session is a scheduling group (autogroup) with a priority of its own. The priority of the
    process is not changed, because pods would inherit it.
    """
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(_PREFERRED))
    except OSError:
        return False
    return True


def stop(process: "subprocess.Popen[bytes]", grace: float = 5.0) -> None:
    """Send SIGTERM, then SIGKILL after `grace` seconds. Blocks until the process has ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def tail(log: Path, lines: int = 15) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def descendants(root: int) -> list[int]:
    """All running descendants of `root`, without zombies."""
    parents: dict[int, list[int]] = {}
    for pid, state, parent in _processes():
        if state != "Z":
            parents.setdefault(parent, []).append(pid)
    found: list[int] = []
    todo = [root]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def marked(mark: Path | str) -> list[int]:
    """Running processes of this user that have this mark, except the calling process."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for pid, state, _ in _processes():
        if state == "Z" or pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def kill_all(find: Callable[[], list[int]], limit: float = 10.0) -> int:
    """Send SIGKILL to what `find` returns until it returns nothing, for at most `limit` seconds.

    Returns the number of processes killed.
    """
    killed: set[int] = set()
    end = time.monotonic() + limit
    while (pids := find()) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        reap()
        time.sleep(0.02)
    reap()
    return len(killed)


def reap() -> None:
    """Reap every child that has ended. Not for a process that waits for a particular child."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def memory_bytes(pids: Iterable[int]) -> int:
    """Sum of the processes' proportional set sizes (PSS)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def _processes() -> list[tuple[int, str, int]]:
    """(pid, state, parent) of every process that this user may see."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The name is in parentheses and may itself contain parentheses.
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            found.append((int(entry), fields[0], int(fields[1])))
    return found
