"""The lab's outermost process: it starts the supervisor and cleans up however the supervisor ends.

The guardian is a child subreaper: if the supervisor is killed, its remaining processes become
children of the guardian, which kills them. If the guardian itself is killed, the kernel sends the
supervisor SIGTERM, and the supervisor stops the lab in order. The guardian must stay small: no
asyncio, no third-party module.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from everstep_lab import kubeconfig, places, procs

BROKE_DOWN = 1
"""Exit status of a supervisor whose lab failed after `up`."""
TOLD = 3
"""Exit status of a supervisor that reported its failure to the caller of `up`."""
_ORDERLY_SECONDS = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    procs.become_subreaper()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD))
    supervisor = procs.spawn(
        [sys.executable, "-m", "everstep_lab.supervisor", *arguments.supervisor],
        log=arguments.root / "logs" / "supervisor.log",
        mark=arguments.root,
        death_signal=signal.SIGTERM,
        pass_fds=arguments.pass_fd,
    )
    for descriptor in arguments.pass_fd:
        if descriptor != arguments.lock:
            os.close(descriptor)
    status = _wait(supervisor.pid)
    procs.kill_all(lambda: procs.descendants(os.getpid()))
    if status == BROKE_DOWN:
        _keep_log(arguments.root)
    remove(arguments.root, arguments.memory)
    return status


def remove(root: Path, memory: Path) -> None:
    """Remove the lab's files. The caller must hold the lock.

    The lock's file is in `root`. It is removed last, because from then on another lab may start and
    use the same names. For the same reason `root` is renamed before it is deleted.
    """
    _remove_kubeconfig(root)
    shutil.rmtree(memory, ignore_errors=True)
    for entry in list(root.iterdir()) if root.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != places.LOCK:
            entry.unlink(missing_ok=True)
    gone = root.with_name(f"{root.name}.gone-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        root.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _remove_kubeconfig(root: Path) -> None:
    """Remove the copy that `up --kubeconfig FILE` wrote."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        copy = json.loads((root / "config.json").read_text())["kubeconfig"]
        if copy and kubeconfig.is_ours(Path(copy)):
            os.unlink(copy)


def remove_leftovers(root: Path, memory: Path) -> str:
    """End the processes and remove the files of a killed lab. Returns what was done.

    The caller must hold the lock. The lock's file is kept.
    """
    killed = procs.kill_all(lambda: procs.marked(root))
    _remove_kubeconfig(root)
    left = [gone for f in (memory, root) for gone in f.parent.glob(f"{f.name}.gone-*")]
    left += [path for path in (memory, failed_log(root)) if path.exists()]
    left += [entry for entry in root.iterdir() if entry.name != "lock"]
    for path in left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if not left and not killed:
        return "there was nothing to remove"
    return f"ended {killed} processes of a killed lab and removed its files"


def failed_log(root: Path) -> Path:
    """The only file that a failed lab leaves. The next `up` or `down` removes it."""
    return root.with_name(f"{root.name}.failed.log")


def _keep_log(root: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.copyfile(root / "logs" / "supervisor.log", failed_log(root))


def take_lock(path: Path) -> int | None:
    """Take the lock. Returns its inheritable file descriptor, or None if another lab holds it."""
    while True:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # the previous holder has just removed the folder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file that we opened.
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                os.set_inheritable(descriptor, True)
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _wait(supervisor: int) -> int:
    """Wait until the supervisor has ended and return its exit status.

    Meanwhile reap orphans, and send the supervisor SIGTERM on SIGTERM or SIGINT.
    """
    limit: float | None = None
    while True:
        watched = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        got = signal.sigtimedwait(watched, 3600.0 if limit is None else limit)
        if got is None and limit is not None:
            os.kill(supervisor, signal.SIGKILL)
        if got is not None and got.si_signo != signal.SIGCHLD:
            os.kill(supervisor, signal.SIGTERM)
            limit = _ORDERLY_SECONDS
        status = _reap(supervisor)
        if status is not None:
            return status


def _reap(supervisor: int) -> int | None:
    found = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == supervisor:
                found = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        return found if found is not None else 1
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="everstep_lab.guardian")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--memory", type=Path, required=True)
    parser.add_argument("--lock", type=int, required=True)
    parser.add_argument("--pass-fd", type=int, action="append", default=[])
    parser.add_argument("supervisor", nargs="*")
    return parser


if __name__ == "__main__":
    sys.exit(main())
